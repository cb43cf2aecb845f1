"""Handlers for models of images: classifiers and embedders."""
