"""Checks of a GPU, each run in a process of its own; they return what was measured beside what was expected."""
