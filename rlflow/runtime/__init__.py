"""Where workers live, and the run itself."""
