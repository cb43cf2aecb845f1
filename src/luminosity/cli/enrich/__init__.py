"""The command ``lum enrich``: run models over a table."""
