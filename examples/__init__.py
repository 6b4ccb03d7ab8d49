"""Programs to read from top to bottom."""
