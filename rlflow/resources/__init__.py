"""What there is (cluster, GPUs, models) and who gets what of it (planner). Knows nothing of recipes and graphs."""
