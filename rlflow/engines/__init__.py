"""What a model can do. One file a library; the file's name is the engine's name in a recipe."""
