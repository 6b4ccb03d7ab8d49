"""What an algorithm does. Importing this package makes the kinds known that recipes may name."""

from rlflow.nodes import (
    advantage,
    converse,
    distillation,
    dynamic_sampling,
    gae,
    generate,
    reward,
    score,
    shaping,
    update,
    value_update,
)

__all__ = [
    "advantage",
    "converse",
    "distillation",
    "dynamic_sampling",
    "gae",
    "generate",
    "reward",
    "score",
    "shaping",
    "update",
    "value_update",
]
