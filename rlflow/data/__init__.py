"""Data sets: reading rows, encoding them as tokens, and generated tasks."""
