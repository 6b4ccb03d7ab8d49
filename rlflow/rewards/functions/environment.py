"""What the environment of a conversation has given over all its turns."""

from collections.abc import Sequence

from rlflow.rewards.base import Row, batched


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row]) -> list[float]:
    """For rollouts of a ``converse`` node, which puts it into their rows."""
    return [row["environment_reward"] for row in rows]
