"""Descriptions of tables: one pass over the rows, mergeable, in bounded memory."""
