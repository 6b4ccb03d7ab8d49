"""The sum of the rewards that the environment gave in all turns of a conversation."""

from collections.abc import Sequence

from rlflow.rewards.base import Row, batched


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[float]:
    """Return the rewards that a ``converse`` node stored in the rows of its rollouts."""
    return [row["environment_reward"] for row in rows]
