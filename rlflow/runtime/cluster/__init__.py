"""The hosts and GPUs that are there, and which of them each host of the plan is."""
