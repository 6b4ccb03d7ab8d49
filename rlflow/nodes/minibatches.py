"""The minibatches of a step, with an optimizer step for each.

Shapes: B rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Minibatch, Packed, Repeated, Sequences
from rlflow.engines.base import TokenLoss, Trains

Aggregation = Literal["token", "sequence", "prompt", "constant"]

_skipped_steps: ContextVar[int] = ContextVar("skipped_steps", default=0)


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """The weight of each token in the loss of its minibatch, whichever ranks and passes the minibatch is cut into.

    ``token``: every token has the same weight, as in DAPO (arXiv 2503.14476, section 3.3). ``prompt``: every prompt has
    the same weight, and so do all tokens of its responses, as in DAPO's equation 8. ``sequence``: every response has
    the same weight, as in GRPO (arXiv 2402.03300, equation 3). ``constant``: every token has the weight 1 / (responses
    x ``constant_length``), whatever the lengths, as in Dr. GRPO (arXiv 2503.20783, section 3.2).
    """

    aggregation: Aggregation = "token"
    constant_length: int | None = None

    def weights(self, lengths: NDArray[np.int64], counting: NDArray[np.bool_], prompts: NDArray[np.int64]) -> Repeated:
        """Return rows of float32 for a minibatch.

        ``lengths`` [B] count the tokens of each response that are the model's own; ``counting`` [B] says which
        responses are trained on; ``prompts`` [B, 2] are the keys of their prompts.
        """
        if self.aggregation == "token":
            divisors = np.full(len(lengths), max(int(lengths[counting].sum()), 1))
        elif self.aggregation == "prompt":
            _, prompt = np.unique(prompts, axis=0, return_inverse=True)
            tokens = np.bincount(prompt, lengths * counting)
            divisors = np.count_nonzero(tokens) * tokens[prompt]
        elif self.aggregation == "sequence":
            divisors = max(int(counting.sum()), 1) * lengths
        else:
            assert self.constant_length is not None
            divisors = np.full(len(lengths), max(int(counting.sum()), 1) * self.constant_length)
        return Repeated((counting / np.maximum(divisors, 1)).astype(np.float32), lengths)

    def expression(self, rows: str) -> str:
        """Return the aggregation for people; ``rows`` names what is averaged over: responses, or some of them."""
        if self.aggregation == "token":
            return f"mean over the tokens of a minibatch's {rows}"
        if self.aggregation == "prompt":
            return f"mean over a minibatch's prompts of the mean over the tokens of their {rows}"
        if self.aggregation == "sequence":
            return f"mean over a minibatch's {rows} of the mean over tokens"
        divisor = "" if self.constant_length == 1 else f" / {self.constant_length}"
        return f"mean over a minibatch's {rows} of the sum over tokens{divisor}"


@dataclass(frozen=True, kw_only=True)
class OptimizerSteps:
    """The optimizer steps that a node makes in a step of the run."""

    num_minibatches: int
    num_epochs: int = 1
    """The passes over all rows. Each cuts different minibatches, the same for all nodes that train on these rows."""
    weighting: Weighting = Weighting()
    first_step: int = 0
    """The step of the run with which the schedule of the learning rate begins."""


@contextmanager
def schedule_behind(num_steps: int) -> Iterator[None]:
    """Keep the schedules of learning rates so many steps behind the run's: steps that were skipped do not count."""
    token = _skipped_steps.set(num_steps)
    try:
        yield
    finally:
        _skipped_steps.reset(token)


def train(
    engine: Trains,
    sequences: Sequences,
    columns: Mapping[str, Packed],
    loss: TokenLoss,
    optimizer_steps: OptimizerSteps,
    counting: NDArray[np.bool_] | None = None,
) -> list[Mapping[str, float]]:
    """Make an optimizer step for each minibatch, and return the metrics of each.

    A minibatch in which a column has no values does not get that column.

    ``counting`` [B] says which rows are trained on, by default all. The other rows, and rows without a token of the
    model's own, have no effect. A minibatch without counting rows makes no optimizer step, since the optimizer's
    moments would change the weights, and has no metrics.
    """
    steps: list[Mapping[str, float]] = []
    bare = sequences.as_sequences()
    first_steps = sequences.keys[:, 0]
    own_tokens, lengths = sequences.own_tokens(), sequences.own_lengths
    counting = lengths > 0 if counting is None else counting & (lengths > 0)
    epochs = range(optimizer_steps.num_epochs)
    for rows in chain.from_iterable(_cut(sequences, optimizer_steps.num_minibatches, epoch) for epoch in epochs):
        if not counting[rows].any():
            steps.append({})
            continue
        part = bare.take(rows)
        columns_of_part = {name: column.take(rows) for name, column in columns.items()}
        minibatch = Minibatch(
            **vars(part),
            # At least one sample was started in this step; the others may come from earlier steps.
            step=int(first_steps.max()) - optimizer_steps.first_step - _skipped_steps.get(),
            columns={name: column for name, column in columns_of_part.items() if column.lengths.any()},
            weights=own_tokens.take(rows).scale(
                optimizer_steps.weighting.weights(lengths[rows], counting[rows], sequences.keys[rows, :2]).run_values
            ),
        )
        steps.append(engine.update(minibatch, loss).values)
    return steps


def mean_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the optimizer steps, and as ``skipped`` the number of steps not made."""
    made = [step for step in steps if step]
    means = {name: float(np.mean([step[name] for step in made])) for name in (made[0] if made else ())}
    return means | ({"skipped": float(len(steps) - len(made))} if len(made) < len(steps) else {})


def first_minibatch(sequences: Sequences, num_minibatches: int) -> NDArray[np.int64]:
    """Return the rows that a step trains on before its first optimizer step."""
    return next(_cut(sequences, num_minibatches, 0))


def _cut(sequences: Sequences, num_minibatches: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each minibatch of an epoch. Fewer rows than minibatches make fewer minibatches.

    The first epoch orders prompts by their numbers within their steps: the data's own order is random already, and
    prompts from earlier steps are spread over all minibatches. Later epochs shuffle the prompts, with a seed made of
    step and epoch alone. The rows of a prompt stay neighbors, since they share its computation, and rows of one
    unit stay in one minibatch.
    """
    first_steps, prompt, sample = sequences.keys.T
    positions = prompt
    if epoch and len(sequences):
        _, groups = np.unique(sequences.keys[:, :2], axis=0, return_inverse=True)
        positions = np.random.default_rng((int(first_steps.max()), epoch)).permutation(int(groups.max()) + 1)[groups]
    order = np.lexsort((sample, first_steps, positions)).reshape(-1, sequences.unit_size)
    for units in np.array_split(order, max(1, min(num_minibatches, len(order)))):
        yield units.ravel()
