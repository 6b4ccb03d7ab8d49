"""A curriculum: prompts are drawn by how difficult they are for the policy, as far as past rewards show.

Shapes: N rows of the data set, L levels of difficulty, P prompts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le, Lt
from numpy.typing import NDArray

from rlflow.batch import Rewards, Rollouts, Selection
from rlflow.errors import RecipeError
from rlflow.nodes.advantages import groups_of
from rlflow.nodes.dynamic_sampling import DynamicSampling
from rlflow.schema import Count, Text

# How far one prompt moves the estimate of its row, and the prompts of a step that of their level, in units of the
# log-odds for each unit of success. A success rate of 0 where 0.5 was expected lowers the row's estimate to 0.12.
_ROW_GAIN, _LEVEL_GAIN = 4.0, 2.0
# A level of which a step has only this many prompts moves by half.
_FEW_PROMPTS = 4
# The most levels whose numbers are reported.
_MAX_REPORTED = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgedPrompts(Selection):
    """The prompts whose rollouts are trained on, and how well all were answered."""

    success: NDArray[np.float64]
    """[P]: the mean reward of the responses, each limited to 0 and 1; NaN for a prompt without any reward."""


class Difficulty:
    """An estimate of the success rate of each row, and the order in which rows are drawn by it.

    As in Elo's rating, the log-odds of a success are the sum of a number for the row's level, which follows the policy,
    and one for the row itself. So a hopeless row returns when the policy has become better at rows of its level.
    """

    def __init__(self, options: "Curriculum", labels: Sequence[str], seed: int) -> None:
        """Start with the same estimate for all rows; ``labels`` [N] are the names of their levels."""
        self._options, self._seed = options, seed
        self._names, self._level_of = np.unique(np.array(labels), return_inverse=True)
        self._levels = np.zeros(len(self._names))
        self._rows = np.zeros(len(labels))
        self._order = np.zeros(0, np.int64)

    @property
    def success(self) -> NDArray[np.float64]:
        """Return the success rate that is expected of each row, [N]."""
        success: NDArray[np.float64] = 1 / (1 + np.exp(-(self._levels[self._level_of] + self._rows)))
        return success

    @property
    def shares(self) -> NDArray[np.float64]:
        """Return the probability with which each row is drawn first, [N]."""
        options, success = self._options, self.success
        weights = success ** (2 * options.target) * (1 - success) ** (2 * (1 - options.target))
        weights[(success < options.retire) | (success > 1 - options.retire)] = 0
        explored = np.full(len(success), 1 / len(success))
        if not weights.any():
            return explored
        shares: NDArray[np.float64] = options.explore * explored + (1 - options.explore) * weights / weights.sum()
        return shares

    def draw(self, step: int, first: int, count: int) -> NDArray[np.int64]:
        """Return the rows of ``count`` prompts of a step, from prompt ``first`` on. None repeats before all are drawn.

        The order of a step is that of its beginning.
        """
        if not first:
            # The largest of log(share) + a Gumbel number each: a draw without replacement.
            with np.errstate(divide="ignore"):  # rows without a share come last
                logs = np.log(self.shares)
            noise = np.random.default_rng([self._seed, step]).gumbel(size=len(logs))
            self._order = np.argsort(-(logs + noise), kind="stable")
        return self._order[np.arange(first, first + count) % len(self._order)]

    def learn(self, rows: NDArray[np.int64], success: NDArray[np.float64]) -> None:
        """Take note of the success rates of these rows, [P]; NaN where it is unknown."""
        rows, success = rows[~np.isnan(success)], success[~np.isnan(success)]
        surprise = success - self.success[rows]
        level, num_levels = self._level_of[rows], len(self._levels)
        counts = np.bincount(level, minlength=num_levels)
        self._levels += _LEVEL_GAIN * np.bincount(level, surprise, num_levels) / (counts + _FEW_PROMPTS)
        np.add.at(self._rows, rows, _ROW_GAIN * surprise)

    def metrics(self, rows: NDArray[np.int64]) -> Mapping[str, float]:
        """Return what was expected of a step's rows, the share of retired rows, and both by level if there are few."""
        success, least = self.success, self._options.retire
        metrics = {
            "expected": float(success[rows].mean()),
            "retired": float(np.mean((success < least) | (success > 1 - least))),
        }
        if 1 < len(self._names) <= _MAX_REPORTED:
            shares = np.bincount(self._level_of[rows], minlength=len(self._names)) / len(rows)
            rates = np.bincount(self._level_of, success) / np.bincount(self._level_of)
            for name, share, rate in zip(self._names.tolist(), shares, rates, strict=True):
                metrics |= {f"share/{name}": float(share), f"success/{name}": float(rate)}
        return metrics

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint saves, as JSON can hold it."""
        known = np.flatnonzero(self._rows)
        return {"levels": self._levels.tolist(), "known": known.tolist(), "rows": self._rows[known].tolist()}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self._levels[:] = saved["levels"]
        self._rows[:] = 0
        self._rows[saved["known"]] = saved["rows"]


@dataclass(frozen=True, kw_only=True)
class Curriculum(DynamicSampling, kind="curriculum", unit="group"):
    """Draw prompts of which the policy answers about ``target``, and retire those that it always or never answers.

    A row with the success rate p is drawn in proportion to p^(2 target) (1 - p)^(2 - 2 target). At the default this is
    the variance of a reward of 0 or 1. Rates are estimated from past rewards, each limited to 0 and 1.
    """

    max_rounds: Count = 1
    """The limit of rounds. With more than one, prompts whose responses all earn the same are replaced by others."""
    target: Annotated[float, Ge(0.05), Le(0.95)] = 0.5
    """The success rate of the prompts that are drawn most often."""
    by: Text | None = None
    """A column of the data, such as a difficulty or a source. Rows with equal values share what is known of them, so
    that the mixture of values moves. Without it, rows of which nothing is known are all equally difficult."""
    retire: Annotated[float, Ge(0), Lt(0.5)] = 0.05
    """Rows with an expected success rate below this, or above 1 minus this, are drawn by ``explore`` alone."""
    explore: Annotated[float, Ge(0), Le(1)] = 0.1
    """The share of prompts that is drawn from all rows equally, so that retired ones are tried again."""

    def check(self, connected: frozenset[str]) -> None:
        if not self.retire < self.target < 1 - self.retire:
            fact = f"{self.target:g} is a success rate of rows that 'retire: {self.retire:g}' leaves out"
            raise RecipeError("target", fact, fix="retire: 0, or another target")

    def check_rows(self, rows: Sequence[Mapping[str, Any]], where: str) -> Iterable[str]:
        if self.by is not None and not all(self.by in row for row in rows):
            number = next(number for number, row in enumerate(rows) if self.by not in row)
            fact = f"row {number} of {where} has no column '{self.by}'"
            raise RecipeError("by", fact, known=list(rows[number]), fix="by: null, or a column that all rows have")
        return ()

    def new_order(self, labels: Sequence[str], seed: int) -> Difficulty:
        """Return the order in which a run draws its rows, before its first step."""
        return Difficulty(self, labels, seed)

    def run(self, rollouts: Rollouts, rewards: Rewards) -> Selection:
        group, known = groups_of(rollouts), ~np.isnan(rewards.values)
        counts = np.bincount(group, known)
        sums = np.bincount(group, np.where(known, rewards.values.clip(0, 1), 0))
        success = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        chosen = super().run(rollouts, rewards).chosen if self.max_rounds > 1 else counts > 0
        return JudgedPrompts(chosen=chosen, success=success)
