"""Scores of a reward model before they train a policy: brought to one scale, and checked against true rewards.

Shapes: B rollouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le, Lt
from numpy.typing import NDArray

from rlflow.batch import Rewards, Rollouts
from rlflow.errors import RecipeError
from rlflow.nodes.advantages import groups_of
from rlflow.nodes.base import Formula, Node, State
from rlflow.schema import Coefficient, Count

# The accuracy must exceed its bound by so many standard errors, and the true reward may fall by so many.
_STANDARD_ERRORS, _FALL_ERRORS = 2.0, 4.0
# The true reward is that of so many times the last groups: it also changes with the prompts, and while a policy starts.
_TRUTH_WINDOWS = 5
_EPSILON = 1e-6


@dataclass
class ScoreMoments(State):
    """The moments of all scores of a run so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """The sum of squared differences from the mean."""

    def add(self, scores: NDArray[np.float64]) -> None:
        """Add the scores of a step (Chan et al. 1979)."""
        if not len(scores):
            return
        before, difference = self.count, float(scores.mean()) - self.mean
        self.count += len(scores)
        self.mean += difference * len(scores) / self.count
        self.squares += float(np.sum((scores - scores.mean()) ** 2)) + difference**2 * before * len(scores) / self.count

    def metrics(self) -> Mapping[str, float]:
        """Return the mean and the standard deviation of all scores before the step."""
        return {"score_mean": self.mean, "score_std": self.std}

    @property
    def std(self) -> float:
        """Return the standard deviation of all scores."""
        return sqrt(self.squares / max(self.count, 1))


@dataclass(frozen=True, kw_only=True)
class ScaledReward(Node, kind="scaled_reward", unit="sample", reads_tokens=False):
    """The reward in standard deviations from the mean of all rewards of the run so far, clipped.

    ``missing_end`` is subtracted from responses that were cut at the token limit.
    """

    clip: Annotated[float, Ge(0.1), Le(1e6)] = 5.0
    """The largest scaled reward in both directions, so that one outlier does not decide an update."""
    missing_end: Coefficient = 0.0
    """The penalty of a response without its end, in standard deviations."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        reward = symbols["rewards"]
        scaled = f"clip(({reward} - mean of {reward} so far) / (std of {reward} so far), -{self.clip:g}, {self.clip:g})"
        penalty = f" - {self.missing_end:g} if the response has no end" if self.missing_end else ""
        return Formula(symbol="s", expression=scaled + penalty)

    def run(self, rollouts: Rollouts, rewards: Rewards, state: ScoreMoments) -> Rewards:
        values = rewards.values.astype(np.float64)
        state.add(values[~np.isnan(values)])
        scaled = ((values - state.mean) / (state.std + _EPSILON)).clip(-self.clip, self.clip)
        return Rewards(values=(scaled - self.missing_end * ~rollouts.finished).astype(np.float32))


@dataclass
class RecentGroups(State):
    """The accuracies and the mean true rewards of the last groups."""

    accuracies: list[float] = field(default_factory=list)
    truths: list[float] = field(default_factory=list)
    best: float | None = None
    """The largest mean of ``truths`` so far, over as many groups as are counted."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckedRewards(Rewards):
    """Rewards, and how well they rank the responses to each prompt."""

    accuracy: float
    """The mean over the last groups."""

    def metrics(self) -> Mapping[str, float]:
        """Return the accuracy, besides the metrics of all rewards."""
        return {**super().metrics(), **({} if np.isnan(self.accuracy) else {"accuracy": self.accuracy})}


@dataclass(frozen=True, kw_only=True)
class RewardGate(Node, kind="reward_gate", unit="batch", compares_groups=True):
    """The rewards as they are, as long as they rank the responses to a prompt as ``truth`` does.

    The accuracy of a group is the share of its pairs with different true rewards that ``rewards`` orders as they do; a
    tie counts half. The run ends where its mean over the last groups is not above ``least``, by two standard errors. It
    also ends where the mean of ``truth``, over five times as many, is four standard errors below its best.
    """

    least: Annotated[float, Ge(0), Lt(1)] = 0.5
    """The accuracy that must be exceeded: chance."""
    groups: Count = 200
    """The number of last groups that are counted. With fewer, nothing is decided yet."""
    may_fall: bool = False
    """Continue although true rewards fall, as where a curriculum makes prompts harder."""

    def formula(self, symbols: Mapping[str, str]) -> Formula:
        return Formula(symbol="r", expression=symbols["rewards"])

    def run(self, rollouts: Rollouts, rewards: Rewards, truth: Rewards, state: RecentGroups) -> Rewards:
        group = groups_of(rollouts)
        accuracies = group_accuracies(group, rewards.values, truth.values)
        state.accuracies = [*state.accuracies, *accuracies][-self.groups :]
        accuracy = float(np.mean(state.accuracies)) if state.accuracies else np.nan
        error = float(np.std(state.accuracies)) / sqrt(self.groups) if state.accuracies else np.nan
        if len(state.accuracies) == self.groups and accuracy - _STANDARD_ERRORS * error <= self.least:
            share = f"{accuracy:.0%} (standard error {error:.1%}) of the pairs of responses in {self.groups} groups"
            fact = f"they order {share} as 'truth' does, which is not clearly above {self.least:.0%}"
            fix = "a reward model that is trained on pairs of this policy's responses (node preference_pairs)"
            raise RecipeError("rewards", fact, fix=fix)
        known = ~np.isnan(truth.values)
        truths = [float(truth.values[known & (group == number)].mean()) for number in np.unique(group[known])]
        self._check_truth([*state.truths, *truths][-_TRUTH_WINDOWS * self.groups :], state)
        return CheckedRewards(values=rewards.values, turns=rewards.turns, accuracy=accuracy)

    def _check_truth(self, truths: list[float], state: RecentGroups) -> None:
        """Raise RecipeError if the policy has become worse for the rewards that it is trained on."""
        state.truths = truths
        if len(truths) < _TRUTH_WINDOWS * self.groups:
            return
        mean, error = float(np.mean(truths)), float(np.std(truths)) * sqrt(2 / len(truths))
        best = mean if state.best is None else state.best
        if not self.may_fall and mean < best - _FALL_ERRORS * error:
            fact = f"'truth' has fallen from {best:.3g} to {mean:.3g} while the policy was trained for them"
            fix = "fewer steps, a larger kl_coef, or a reward model that is trained on pairs of this policy's responses"
            raise RecipeError("rewards", fact, fix=fix)
        state.best = max(best, mean)


def group_accuracies(
    group: NDArray[np.int64], scores: NDArray[np.floating[Any]], truth: NDArray[np.floating[Any]]
) -> list[float]:
    """Return for each group [B] with different true rewards the share of its pairs that the scores order correctly.

    A tie of scores counts half. Responses without a score or a true reward do not count.
    """
    known = ~(np.isnan(scores) | np.isnan(truth))
    accuracies = []
    for number in np.unique(group[known]):
        rows = np.flatnonzero(known & (group == number))
        is_better = truth[rows][:, None] > truth[rows]
        if is_better.any():
            order = np.sign(scores[rows][:, None] - scores[rows])
            accuracies.append(float(np.mean((1 + order[is_better]) / 2)))
    return accuracies
