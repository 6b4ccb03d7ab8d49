"""What an algorithm does. Importing this package makes the kinds known that recipes may name."""

from rlflow.nodes import (
    advantage,
    converse,
    distillation,
    dpo,
    dynamic_sampling,
    gae,
    generate,
    reward,
    reward_model,
    score,
    shaping,
    update,
    value_update,
)

__all__ = [
    "advantage",
    "converse",
    "distillation",
    "dpo",
    "dynamic_sampling",
    "gae",
    "generate",
    "reward",
    "reward_model",
    "score",
    "shaping",
    "update",
    "value_update",
]
