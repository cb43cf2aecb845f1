"""Handlers for models of Hugging Face that take text: embedders, classifiers, generators."""
