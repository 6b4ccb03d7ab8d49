"""Commands that print a table: ``python -m benchmarks.NAME [--json FILE]``."""
