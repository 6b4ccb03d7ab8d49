"""Scripts of other libraries as recipes."""
