"""What an algorithm does. Importing this package makes the kinds known that recipes may name."""

from rlflow.nodes import advantage, dpo, generate, reward, reward_model, score, shaping, update

__all__ = ["advantage", "dpo", "generate", "reward", "reward_model", "score", "shaping", "update"]
