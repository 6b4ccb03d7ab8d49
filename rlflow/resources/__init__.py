"""Resources: clusters, models, layouts, memory and time, and the planner. Nothing here knows about recipes."""
