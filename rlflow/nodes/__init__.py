"""What an algorithm does. Importing this package makes the kinds known that recipes may name."""

from rlflow.nodes import (
    advantages,
    dynamic_sampling,
    gae,
    generate,
    policy_update,
    preference,
    reward,
    reward_model,
    reward_shaping,
    scoring,
    value_update,
)

__all__ = [
    "advantages",
    "dynamic_sampling",
    "gae",
    "generate",
    "policy_update",
    "preference",
    "reward",
    "reward_model",
    "reward_shaping",
    "scoring",
    "value_update",
]
