"""Environments that answer a model turn by turn. The built-in ones are in ``classes``, one file each."""
