"""Data sets: reading rows, encoding them as tokens, and two synthetic tasks."""
