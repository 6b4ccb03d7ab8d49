"""What an algorithm does. Importing this package makes the kinds known that recipes may name."""

from rlflow.nodes import advantage, converse, distillation, generate, reward, score, shaping, update

__all__ = ["advantage", "converse", "distillation", "generate", "reward", "score", "shaping", "update"]
