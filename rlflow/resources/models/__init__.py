"""Figures of model architectures and of their parameters."""
