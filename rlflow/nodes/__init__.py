"""What an algorithm does. Importing this package makes the kinds known that recipes may name."""

from rlflow.nodes import advantage, converse, generate, reward, score, shaping, update

__all__ = ["advantage", "converse", "generate", "reward", "score", "shaping", "update"]
