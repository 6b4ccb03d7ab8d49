"""Reward functions, the processes that run them, and a sandbox for programs that a model wrote."""
