"""Read tables from files, and write them to files and vector stores.

Nothing in this package knows the engine or models.
"""
