"""What a person sees of a run, while it runs and after."""
