"""Handlers for text models of transformers: embedders, classifiers and generators."""
