"""Lengths of prompts and responses as a distribution of equally likely values, expected or measured by a past run."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import exp, sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np

from rlflow.errors import RecipeError

_POINTS = 256
# Intervals of the survival curves. Twice as many change the time of a generation by less than 2 %.
_INTERVALS = 24
# The standard deviation of the logarithm. Published response lengths of reasoning models spread by 0.6 to 1.0 (their
# mean is 1.2 to 1.6 times the median), short chat answers less.
_SPREAD = 0.8


@dataclass(frozen=True)
class Lengths:
    """The distribution of the tokens of a prompt or a response."""

    values: tuple[float, ...]
    """Equally likely values in ascending order."""

    @cached_property
    def mean(self) -> float:
        """Return the mean length."""
        return sum(self.values) / len(self.values)

    @property
    def longest(self) -> float:
        """Return the longest length."""
        return self.values[-1]

    @cached_property
    def mean_square(self) -> float:
        """Return the mean of the squared lengths."""
        return sum(value * value for value in self.values) / len(self.values)

    @property
    def residual(self) -> float:
        """Return the mean remaining length of a sequence observed at a random moment; its mean age is the same."""
        return self.mean_square / (2 * self.mean)

    @property
    def relative_variance(self) -> float:
        """Return the variance as a share of the squared mean."""
        return max(0.0, self.mean_square / self.mean**2 - 1)

    @cached_property
    def survival(self) -> tuple[float, ...]:
        """Return the share of sequences longer than a number of tokens, averaged over each of equal intervals."""
        return self._means(lambda tokens: sum(min(value, tokens) for value in self.values) / len(self.values))

    @cached_property
    def residual_survival(self) -> tuple[float, ...]:
        """Return ``survival`` for the remaining lengths of sequences observed at a random moment (renewal theory)."""
        # The share with a remaining length above x is the mean of max(0, value - x) divided by the mean.
        scale = 2 * self.mean * len(self.values)
        return self._means(
            lambda tokens: sum(value * value - max(0.0, value - tokens) ** 2 for value in self.values) / scale
        )

    def longest_of(self, count: float) -> float:
        """Return the expected longest of ``count`` draws: the quantile ``count / (count + 1)``."""
        return self.values[min(len(self.values) - 1, int(len(self.values) * count / (count + 1)))]

    @classmethod
    def log_normal(cls, mean: float, limit: float) -> "Lengths":
        """Return log-normal lengths with the given mean, cut at ``limit`` as generation cuts them.

        If the mean is near the limit, much of the distribution is cut. One value of 256 is the limit, since a few of
        thousands of responses repeat themselves without end (published clip ratios are 0.2 to 5 %). This is left out
        where those alone would make more than half of the mean.
        """
        return _log_normal(min(mean, limit), limit)

    def _means(self, integral: Callable[[float], float]) -> tuple[float, ...]:
        width = self.longest / _INTERVALS
        at = [integral(width * index) for index in range(_INTERVALS + 1)]
        return tuple((at[index + 1] - at[index]) / width for index in range(_INTERVALS))


@cache
def _log_normal(mean: float, limit: float) -> Lengths:
    """Return the lengths whose median gives the mean. A plan asks for the same ones many times."""
    endless = limit <= mean * _POINTS / 2
    low, high = mean / 8, mean * 64
    for _ in range(40):
        median = sqrt(low * high)
        values = tuple(min(limit, max(1.0, median * factor)) for factor in _factors())
        lengths = Lengths((*values[:-1], limit) if endless else values)
        low, high = (median, high) if lengths.mean < mean else (low, median)
    return lengths


@cache
def _factors() -> tuple[float, ...]:
    normal = NormalDist()
    return tuple(exp(_SPREAD * normal.inv_cdf((index + 0.5) / _POINTS)) for index in range(_POINTS))


def lengths_from(values: Sequence[float], limit: float, path: str) -> Lengths:
    """Return the distribution of measured or expected lengths; those beyond ``limit`` end there.

    Raises RecipeError for none, or one that is not positive.
    """
    if not values:
        raise RecipeError(path, "has no lengths", fix="give at least one number of tokens, or auto")
    if (wrong := next((value for value in values if value <= 0), None)) is not None:
        raise RecipeError(path, f"{wrong:g} is not a number of tokens", fix=f"lengths of 1 to {limit:g}")
    return Lengths(tuple(sorted(min(value, limit) for value in values)))


QUANTILES = (10, 50, 90)
"""Quantiles in hundredths of the response lengths that a run records for every step, as ``length_p10`` and so on."""
_STEPS = 20
_PERCENTILES = np.arange(5, 100, 10)


def past_lengths(folder: str, path: str) -> tuple[float, ...]:
    """Return equally likely lengths from the last steps of the run in ``folder``, which the recipe names at ``path``.

    Raises RecipeError for a folder without such a run.
    """
    steps = [lengths for line in _lines(Path(folder), path) if (lengths := _lengths(line))]
    if not steps:
        raise RecipeError(
            path, f"the run in '{folder}' has no response lengths", fix="a run that generates, or numbers"
        )
    return tuple(sorted(length for lengths in steps[-_STEPS:] for length in lengths))


def _lines(folder: Path, path: str) -> list[Mapping[str, float]]:
    """Return the lines of the run's metrics, without an incomplete last line of a run that was killed.

    Raises RecipeError for a file that is missing, and for a line that holds anything else.
    """
    file = folder / "metrics.jsonl"
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError):
        raise RecipeError(
            path, f"no metrics.jsonl of a run in '{folder}'", fix="the folder of a run, a number of tokens, or auto"
        ) from None
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()
    parsed = []
    for number, line in enumerate(lines, 1):
        metrics = _metrics(line)
        if metrics is None:
            fix = f"remove line {number} of '{file}', or name another run"
            raise RecipeError(path, f"line {number} of '{file}' does not hold the metrics of a step", fix=fix)
        parsed.append(metrics)
    return parsed


def _metrics(line: str) -> Mapping[str, float] | None:
    """Return the numbers of a step by their names; None for a line that holds anything else."""
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(metrics, dict) or any(type(value) not in (int, float) for value in metrics.values()):
        return None
    nodes = [name.removesuffix("/length_p50") for name in metrics if name.endswith("/length_p50")]
    expected = [*(f"length_p{quantile}" for quantile in QUANTILES), "length_max"]
    return metrics if all(f"{node}/{name}" in metrics for node in nodes for name in expected) else None


def _lengths(line: Mapping[str, float]) -> list[float]:
    """Return ten lengths of one step, interpolated between its quantiles; the last is its longest."""
    node = next((key.removesuffix("/length_p50") for key in line if key.endswith("/length_p50")), None)
    if node is None:
        return []
    known = [line[f"{node}/length_p{quantile}"] for quantile in QUANTILES]
    longest = line[f"{node}/length_max"]
    between = np.interp(_PERCENTILES, (*QUANTILES, 100), (*known, longest))
    return [*map(float, between[:-1]), float(longest)]
