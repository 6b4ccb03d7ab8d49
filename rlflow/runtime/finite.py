"""Checks that the outputs of nodes have no NaN and no infinite values, apart from rollouts that are excluded.

Values in object stores stay there: the process that put them has checked them (``Block.is_finite``). They are read only
where one of them is not finite.

Shapes: B rollouts.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import (
    Advantages,
    Logprobs,
    Packed,
    Rewards,
    RolloutAdvantages,
    Rollouts,
    Sequences,
    TokenAdvantages,
    ValueEstimates,
    describe_samples,
)
from rlflow.errors import EngineError, NotFiniteError


def check_values(output: Any, batches: Iterable[Any]) -> None:
    """Raise NotFiniteError for logprobs, values and advantages of an output that are not finite.

    ``batches`` are batches of the step, from which the message takes the keys of the samples.
    """
    column = values_of(output)
    if column is None or column.is_finite:
        return
    rows, tokens = places_not_finite(output)
    if not len(rows):
        return
    bad = np.unique(rows)
    keys = keys_of(output, batches)
    where = f"rows {', '.join(map(str, bad[:3]))}" if keys is None else describe_samples(keys[bad])
    kinds = {"logprobs": Rollouts | Logprobs, "values": ValueEstimates, "advantages": TokenAdvantages}
    noun = next(noun for noun, kind in kinds.items() if isinstance(output, kind))
    raise NotFiniteError(
        f"{len(rows)} {noun} of {len(bad)} of {len(column)} samples are not finite ({where}; first at token "
        f"{tokens[0]})."
    )


def values_of(output: Any) -> Packed | None:
    """Return the column of an output that must be finite, or None."""
    if isinstance(output, Rollouts):
        return output.logprobs
    return output.values if isinstance(output, Logprobs | ValueEstimates | TokenAdvantages) else None


def places_not_finite(output: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row of each value of ``values_of`` that is not finite, and its token in that row.

    Excluded rollouts do not count.
    """
    column = values_of(output)
    assert column is not None
    bad = np.flatnonzero(~np.isfinite(column.values))
    rows = np.searchsorted(column.offsets, bad, side="right") - 1
    if isinstance(output, TokenAdvantages):
        bad, rows = (numbers[output.is_included[rows]] for numbers in (bad, rows))
    return rows, bad - column.offsets[rows]


def keys_of(output: Any, batches: Iterable[Any]) -> NDArray[np.int64] | None:
    """Return the keys of an output's samples, [B, 3], from itself or from a batch of the same samples, or None."""
    column = output.values if isinstance(output, Advantages) else values_of(output)
    assert column is not None
    sequences = (batch for batch in (output, *batches) if isinstance(batch, Sequences))
    return next((batch.keys for batch in sequences if np.array_equal(batch.response_ids.lengths, column.lengths)), None)


def check_advantages(output: Any, inputs: Mapping[str, Any]) -> None:
    """Raise NotFiniteError for advantages that are not finite although nothing explains it.

    Raises EngineError unless each sample has one. A rollout without a reward has no advantage on purpose, and may take
    the other rollouts of its prompt with it. The same holds for a conversation that failed and for a response without
    tokens of the model's own.
    """
    rollouts = next((batch for batch in inputs.values() if isinstance(batch, Rollouts)), None)
    if not isinstance(output, Advantages) or rollouts is None:
        return
    if len(output) != len(rollouts):
        raise EngineError(f"expected an advantage for each of {len(rollouts)} samples, got {len(output)}.")
    if output.is_included.all():
        return
    excluded = _prompts_without_reward(inputs)
    missing = np.flatnonzero(~output.is_included)
    infinite = np.zeros(len(rollouts), np.bool_)
    if isinstance(output, RolloutAdvantages):
        infinite = np.isinf(output.values.run_values)
    bad = [row for row in missing if infinite[row] or tuple(rollouts.keys[row, :2]) not in excluded]
    if bad:
        raise NotFiniteError(
            f"the advantage is not finite for {len(bad)} of {len(rollouts)} samples that have a reward "
            f"({describe_samples(rollouts.keys[bad])}). A division by zero causes that: by the number of other "
            "responses in a group of one, or by a standard deviation of zero."
        )


def _prompts_without_reward(inputs: Mapping[str, Any]) -> set[tuple[int, ...]]:
    """Return step and prompt of all rollouts that lack a reward, failed, or have no tokens of the model's own."""
    prompts: set[tuple[int, ...]] = set()
    for rollouts in (batch for batch in inputs.values() if isinstance(batch, Rollouts)):
        lacks = rollouts.failed | (rollouts.own_lengths == 0)
        for rewards in inputs.values():
            if isinstance(rewards, Rewards) and len(rewards) == len(rollouts):
                lacks = lacks | np.isnan(rewards.values)
        prompts.update(map(tuple, rollouts.keys[lacks, :2]))
    return prompts
