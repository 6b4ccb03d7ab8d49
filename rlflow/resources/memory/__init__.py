"""What a GPU holds, by named terms."""
