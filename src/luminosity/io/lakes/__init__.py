"""Tables that have a name instead of files: Iceberg and Delta, Hugging Face datasets and Lance."""
