"""Handlers for models: torch modules, JAX functions, text models of transformers, model servers."""
