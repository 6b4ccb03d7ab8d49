"""Measures a machine for the planner: its kernels, and short runs of rlflow's own engines."""
