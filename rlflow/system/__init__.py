"""Memory, files, locks and signals of the operating system."""
