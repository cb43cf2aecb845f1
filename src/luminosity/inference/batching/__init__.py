"""Decides which examples go into one batch, and when: pure decisions that get the time from their caller."""
