"""Tasksets of verifiers, which finds them as modules at the top of PYTHONPATH."""
