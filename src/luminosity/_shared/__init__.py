"""Helpers that several parts share: text, locks, the terminal, flags, processes, folders."""
