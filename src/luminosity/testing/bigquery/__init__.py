"""A BigQuery in Python for tests."""
