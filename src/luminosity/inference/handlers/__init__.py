"""Handlers for models of JAX, torch and transformers, one kind a file."""
