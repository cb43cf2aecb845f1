"""Plans put into words and pictures, without running anything."""
