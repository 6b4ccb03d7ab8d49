"""The run itself: in this process, or on a cluster."""
