"""The runtime runs a plan: in this process, or on a Ray cluster."""
