"""The HTTP endpoint of an engine, in a process of its own."""
