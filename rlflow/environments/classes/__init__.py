"""The environments that a recipe may name, each a file."""
