"""Agents of other libraries, a file for each."""
