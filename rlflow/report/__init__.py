"""The output of a run for people: progress, warnings and errors, files of metrics, and summaries."""
