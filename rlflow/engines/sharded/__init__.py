"""Parts of the DeepSpeed engine."""
