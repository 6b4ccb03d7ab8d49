"""A step's rows as minibatches, and an optimizer step for each.

Shapes: B rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
        return Repeated((counting / np.maximum(each, 1)).astype(np.float32), lengths)

    def expression(self, rows: str) -> str:
        """Return the aggregation for people; ``rows`` says what is counted: responses, or some of them."""
        if self.aggregation == "token":
            return f"mean over the tokens of a minibatch's {rows}"
        if self.aggregation == "sequence":
            return f"mean over a minibatch's {rows} of the mean over tokens"
        divisor = "" if self.constant_length == 1 else f" / {self.constant_length}"
        return f"mean over a minibatch's {rows} of the sum over tokens{divisor}"


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

    ``counting`` [B] are the rows that are trained on, by default all; the others are as if they were not there, and so
    are rows without a token of the model's own. Where a minibatch has none there is no step, which the optimizer's
    moments would make one of, and no metrics. ``first_step`` of the run is that with which the schedule of the learning
    rate begins. Each epoch cuts other minibatches, the same ones for all nodes that train on these rows.
    """
    steps: list[Mapping[str, float]] = []
    bare = sequences.as_sequences()
    begun_in = sequences.keys[:, 0]
    own, lengths = sequences.own_tokens(), sequences.own_lengths
    counting = lengths > 0 if counting is None else counting & (lengths > 0)
    cuts = (_cut(sequences, num_minibatches, epoch) for epoch in range(num_epochs))
    for rows in chain.from_iterable(cuts):
        if not counting[rows].any():
            steps.append({})
            continue
        part = bare.take(rows)
        minibatch = Minibatch(
            **vars(part),
            # Some of every step's samples were begun in it.
            step=int(begun_in.max()) - first_step,
            columns={name: column.take(rows) for name, column in columns.items()},
            weights=own.take(rows).scale(weighting.weights(lengths[rows], counting[rows]).run_values),
        )
        steps.append(engine.update(minibatch, loss).values)
    return steps


def _cut(sequences: Sequences, num_minibatches: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each minibatch of an epoch. Fewer rows than minibatches make fewer minibatches.

    The first epoch takes prompts by their numbers within their steps: the data's own order is random already, and what
    was begun in earlier steps is spread over all minibatches. Later epochs shuffle the prompts, by draws that follow
    from step and epoch alone. The rows of a prompt stay neighbours, since they share its computation, and rows that
    belong to one unit are in one minibatch.
    """
    begun_in, prompt, sample = sequences.keys.T
    places = prompt
    if epoch and len(sequences):
        _, groups = np.unique(sequences.keys[:, :2], axis=0, return_inverse=True)
        places = np.random.default_rng((int(begun_in.max()), epoch)).permutation(int(groups.max()) + 1)[groups]
    order = np.lexsort((sample, begun_in, places)).reshape(-1, sequences.unit_size)
    for units in np.array_split(order, max(1, min(num_minibatches, len(order)))):
        yield units.ravel()


def averaged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps; and ``skipped``, where any were, how many."""
    taken = [step for step in steps if step]
    means = {name: float(np.mean([step[name] for step in taken])) for name in (taken[0] if taken else ())}
    return means | ({"skipped": float(len(steps) - len(taken))} if len(taken) < len(steps) else {})
