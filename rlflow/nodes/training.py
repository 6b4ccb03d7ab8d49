"""A step's rows as minibatches, and an optimizer step for each.

Shapes: B rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Minibatch, Packed, Repeated, Sequences
from rlflow.engines.base import TokenLoss, Trains

Aggregation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """What a token counts in the loss of its minibatch, whichever ranks and passes that is cut into.

    ``token``: every token the same, as in DAPO (arXiv 2503.14476, section 3.3; its equation 8 does so within each
    prompt's group, and takes the mean over these). ``sequence``: every response the same,
    as in GRPO (arXiv 2402.03300, equation 3). ``constant``: every token over the number of responses and a
    ``constant_length``, whatever their lengths, as in Dr. GRPO (arXiv 2503.20783, section 3.2).
    """

    aggregation: Aggregation = "token"
    constant_length: int | None = None

    def weights(self, lengths: NDArray[np.int64], counting: NDArray[np.bool_]) -> Repeated:
        """Rows of float32, from the lengths [B] of a minibatch's responses, in tokens that count, and whether each is
        trained on [B]."""
        if self.aggregation == "token":
            each = np.full(len(lengths), max(int(lengths[counting].sum()), 1))
        elif self.aggregation == "sequence":
            each = max(int(counting.sum()), 1) * lengths
        else:
            assert self.constant_length is not None
            each = np.full(len(lengths), max(int(counting.sum()), 1) * self.constant_length)
        return Repeated((counting / each).astype(np.float32), lengths)


def train(
    engine: Trains,
    sequences: Sequences,
    columns: Mapping[str, Packed],
    loss: TokenLoss,
    *,
    num_minibatches: int,
    num_epochs: int = 1,
    weighting: Weighting = Weighting(),
    counting: NDArray[np.bool_] | None = None,
    first_step: int = 0,
) -> list[Mapping[str, float]]:
    """One optimizer step a minibatch, and the metrics of each. Fewer rows than minibatches make fewer minibatches.

    ``counting`` [B] are the rows that are trained on, by default all; the others are as if they were not there. Where a
    minibatch has none there is no step, which the optimizer's moments would make one of, and no metrics. ``first_step``
    of the run is that with which the schedule of the learning rate begins.
    A minibatch is cut in the order of the prompts' numbers within their steps: the data's own order is random already,
    and what was begun in earlier steps is spread over all minibatches. Rows that must be ``together`` are.
    """
    steps: list[Mapping[str, float]] = []
    bare = sequences.bare()
    begun_in, prompt, sample = sequences.keys.T
    counting = np.ones(len(sequences), np.bool_) if counting is None else counting
    order = np.lexsort((sample, begun_in, prompt)).reshape(-1, sequences.together)
    own, lengths = sequences.own_tokens(), sequences.own_lengths
    for units in num_epochs * np.array_split(order, max(1, min(num_minibatches, len(order)))):
        rows = units.ravel()
        if not counting[rows].any():
            steps.append({})
            continue
        part = bare.take(rows)
        minibatch = Minibatch(
            **vars(part),
            # Some of every step's samples were begun in it.
            step=int(begun_in.max()) - first_step,
            columns={name: column.take(rows) for name, column in columns.items()},
            weights=own.take(rows).scaled(weighting.weights(lengths[rows], counting[rows]).each),
        )
        steps.append(engine.update(minibatch, loss).values)
    return steps


def averaged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps; and ``skipped``, where any were, how many."""
    taken = [step for step in steps if step]
    means = {name: float(np.mean([step[name] for step in taken])) for name in (taken[0] if taken else ())}
    return means | ({"skipped": float(len(steps) - len(taken))} if len(taken) < len(steps) else {})
