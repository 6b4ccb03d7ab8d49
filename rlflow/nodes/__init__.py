"""What an algorithm does. Importing this package makes the kinds known that recipes may name."""

from rlflow.nodes import advantage, distillation, dynamic_sampling, generate, reward, score, shaping, update

__all__ = ["advantage", "distillation", "dynamic_sampling", "generate", "reward", "score", "shaping", "update"]
