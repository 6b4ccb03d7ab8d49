"""Checks of a GPU, each run in a process of its own; they return measurements beside what was expected."""
