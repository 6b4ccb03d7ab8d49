"""The search for a plan: ways to share GPUs, sizes, degrees, places, and why."""
