"""What stands behind WriteTable: workers write temporary files, and a last step gives them their names."""
