"""Encoders of texts without padding: the rows of a batch lie one after the other."""
