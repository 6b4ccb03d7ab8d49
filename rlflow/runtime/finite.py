"""Every rollout that has a reward must get an advantage."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlflow.batch import Advantages, Rewards, RolloutAdvantages, Rollouts, named_samples
from rlflow.errors import EngineError


def check_advantages(node: str, output: Any, inputs: Mapping[str, Any]) -> None:
    """Raise EngineError for advantages that are not finite although nothing explains it.

    A rollout without a reward has no advantage on purpose, and may take the other rollouts of its prompt with it. The
    same holds for a conversation that failed and for a response without tokens of the model's own.
    """
    rollouts = next((each for each in inputs.values() if isinstance(each, Rollouts)), None)
    if not isinstance(output, Advantages) or rollouts is None or output.known.all():
        return
    excluded = _prompts_without_reward(inputs)
    missing = np.flatnonzero(~output.known)
    infinite = set(np.flatnonzero(np.isinf(output.values.each))) if isinstance(output, RolloutAdvantages) else set()
    bad = [row for row in missing if row in infinite or tuple(rollouts.keys[row, :2]) not in excluded]
    if bad:
        raise EngineError(
            f"node {node}: the advantage is not finite for {len(bad)} of {len(rollouts)} samples that have a reward "
            f"({named_samples(rollouts.keys[bad])}). A division by the others of a group of one, or by a standard "
            "deviation of zero, gives that."
        )


def _prompts_without_reward(inputs: Mapping[str, Any]) -> set[tuple[int, ...]]:
    """Return step and prompt of all rollouts that lack a reward, failed, or have no tokens of the model's own."""
    rollouts = [each for each in inputs.values() if isinstance(each, Rollouts)]
    found: set[tuple[int, ...]] = set()
    for written in rollouts:
        lacks = written.failed | (written.own_lengths == 0)
        for rewards in inputs.values():
            if isinstance(rewards, Rewards) and len(rewards) == len(written):
                lacks = lacks | np.isnan(rewards.values)
        found.update(map(tuple, written.keys[lacks, :2]))
    return found
