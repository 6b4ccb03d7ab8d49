"""Compare the planner's memory and time with configurations that other people ran."""
