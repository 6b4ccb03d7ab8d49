"""What answers a model, turn by turn: environments, one file each, and their steps in processes of their own."""
