"""``Enrich``: columns that models add to a table."""
