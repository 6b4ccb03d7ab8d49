"""The planner held against configurations that other people ran: memory and time."""
