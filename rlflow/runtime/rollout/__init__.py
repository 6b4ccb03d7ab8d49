"""Which engine writes which sample, and when."""
