"""Rollouts of several turns.

Shapes: B conversations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.batch.batch import Rollouts, count_reasons
from rlflow.batch.packed import Packed, Repeated, offsets_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Conversations(Rollouts):
    """Rollouts whose responses alternate between a model and an environment. The environment's tokens have logprob 0.

    ``finished`` is True where the environment ended the conversation. ``texts`` hold only the model's last turns.
    ``rows`` hold the sum of the environment's rewards as ``environment_reward``.
    """

    turn: Repeated
    """B rows of int32: the turn in which the model generated the token, counted from 0; -1 for the environment's."""
    turn_rewards: Packed
    """B rows of float32: what the environment gave for each complete turn of the model."""
    reasons: NDArray[np.str_]
    """[B]: why the environment failed; empty where it did not."""
    unfinished: Packed
    """B rows of uint8: JSON that an engine needs to resume a conversation. Empty where it is done. A row that does not
    begin with a brace also has a pickle of the environment, and never leaves the run."""
    measures: Sequence[Mapping[str, float]]
    """B mappings: further numbers of each conversation, which become metrics."""
    turn_seconds: Packed | None = None
    """B rows of float32: for each complete turn, how long the model was not asked before it, and how long it took; None
    where nobody measured it."""

    @property
    def failed(self) -> NDArray[np.bool_]:
        return np.asarray(self.reasons != "")

    def own_tokens(self) -> Repeated:
        return Repeated(self.turn.run_values >= 0, self.turn.run_lengths, self.turn.runs_per_row)

    @property
    def turn_lengths(self) -> Packed:
        runs, counts = self.turn, self.turn.runs_per_row
        rows = np.repeat(np.arange(len(self)), 1 if counts is None else counts)
        is_turn = (runs.run_values >= 0) & (runs.run_lengths > 0)
        return Packed(runs.run_lengths[is_turn], offsets_of(np.bincount(rows[is_turn], minlength=len(self))))

    def metrics(self) -> Mapping[str, float]:
        """Return the turns, the share of failed conversations, the means of measures, and those of all rollouts."""
        turns = {"turns_mean": float(np.mean(self.turn_rewards.lengths)), "failed": float(np.mean(self.failed))}
        names = dict.fromkeys(name for measures in self.measures for name in measures)
        means = {name: sum(measures.get(name, 0.0) for measures in self.measures) / len(self) for name in names}
        return {**turns, **means, **super().metrics()}

    def failures(self) -> Mapping[str, int]:
        """Return why environments failed."""
        return count_reasons(self.reasons)
