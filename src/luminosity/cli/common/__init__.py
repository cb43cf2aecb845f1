"""What the commands of ``lum`` share: options, output, tables, scripts and exit codes."""
