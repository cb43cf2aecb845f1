"""Tokenizers and chat templates without transformers, whose import takes seconds in every process."""
