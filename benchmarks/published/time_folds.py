"""Judge the step times of each system with constants and ranges that were fitted without it.

The constants are those of ``Efficiency`` that were fitted to published runs; a range holds measured over predicted
times of other systems. Every system has the same weight, whatever its number of rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import exp, log
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.published import times
from benchmarks.published.leave_one_out import system_of, weighted_quantile
from benchmarks.published.times import Judged
from rlflow.resources.planner.confidence import Band, TimeKind
from rlflow.resources.time.speed import Efficiency

GRID = tuple(
    Efficiency(message_s=message, overlap=overlap)
    for message, overlap in product((15e-6, 30e-6, 45e-6), (0.25, 0.5, 0.75))
)
"""The constants to choose from."""
_CLEARLY_BETTER = 0.97
"""Other constants replace the defaults only if their mean error is smaller by this factor."""
_LARGEST_ERROR = 0.5
"""Larger logarithmic errors count as this one: they have other causes than these constants."""
_COVERED = (0.05, 0.95)
"""The quantiles at the ends of a range."""
_ENOUGH_ROWS = 3
"""Systems with fewer rows have the weight of one system together, and do not widen the ranges of others."""
_FEW = "systems with few rows"


@dataclass(frozen=True)
class Fold:
    """A system that was left out, with the constants and ranges of the others."""

    system: str
    efficiency: Efficiency
    ranges: Mapping[TimeKind, Band]
    errors: tuple[tuple[TimeKind, float], ...]
    """For every row its kind, and the logarithm of measured over predicted."""

    @property
    def inside(self) -> list[bool]:
        """Return whether the time of each row is inside the range of its kind."""
        return [log(self.ranges[kind].low) <= error <= log(self.ranges[kind].high) for kind, error in self.errors]

    @property
    def relative_errors(self) -> list[float]:
        """Return the error of each prediction as a share of what was measured."""
        return [abs(exp(-error) - 1) for _, error in self.errors]

    @property
    def errors_with_one_constant(self) -> list[float]:
        """Return the errors after each row was corrected by the median factor of the system's other rows."""
        logs = [error for _, error in self.errors]
        others = [logs[:index] + logs[index + 1 :] for index in range(len(logs))]
        return [abs(exp(median(rest) - error) - 1) for error, rest in zip(logs, others, strict=True) if rest]


class Errors:
    """The logarithmic errors of all rows for all constants of the grid."""

    def __init__(self, judged: Sequence[Judged]) -> None:
        self._rows = [one for one in judged if not one.is_bound]
        self._default = self._errors_of(Efficiency())

    def _errors_of(self, efficiency: Efficiency) -> Mapping[str, list[tuple[TimeKind, float]]]:
        errors: dict[str, list[tuple[TimeKind, float]]] = {}
        for one in self._rows:
            seconds = times.predict(one.case, efficiency).seconds
            errors.setdefault(system_of(one.case.row), []).append((kind_of(one), log(one.measured / seconds)))
        return errors

    @cached_property
    def _grid(self) -> list[Mapping[str, list[tuple[TimeKind, float]]]]:
        return [self._errors_of(efficiency) for efficiency in GRID]

    @property
    def systems(self) -> list[str]:
        """Return the names of all systems."""
        return sorted(self._default)

    def fit(self, *without: str) -> Efficiency:
        """Return the constants with the smallest mean error over systems, some of which are left out."""
        costs = [_cost(errors, without) for errors in self._grid]
        best = min(range(len(GRID)), key=costs.__getitem__)
        better = costs[best] < _CLEARLY_BETTER * _cost(self._default, without)
        return GRID[best] if better else Efficiency()

    def of(self, system: str, efficiency: Efficiency) -> tuple[tuple[TimeKind, float], ...]:
        """Return the errors of a system with these constants."""
        errors = self._default if efficiency == Efficiency() else self._grid[GRID.index(efficiency)]
        return tuple(errors[system])

    def ranges(self, *without: str) -> Mapping[TimeKind, Band]:
        """Return the ranges of systems that are not left out, each of them predicted without itself."""
        found: list[tuple[str, TimeKind, float]] = []
        for system in self.systems:
            mine = () if system in without else self.of(system, self.fit(system, *without))
            found += [(system, kind, error) for kind, error in mine if len(mine) >= _ENOUGH_ROWS]
        ranges = {}
        for kind in TimeKind:
            errors = [(system, error) for system, of, error in found if of is kind]
            counts = Counter(system for system, _ in errors)
            weighted = [(error, 1 / counts[system]) for system, error in errors]
            low, high = (weighted_quantile(weighted, share) for share in _COVERED) if weighted else (0.0, 0.0)
            ranges[kind] = Band(exp(min(0.0, low)), exp(max(0.0, high)))
        return ranges


def _cost(errors: Mapping[str, Sequence[tuple[TimeKind, float]]], without: Sequence[str]) -> float:
    means = [
        sum(min(_LARGEST_ERROR, abs(error)) for _, error in rows) / len(rows)
        for system, rows in errors.items()
        if system not in without
    ]
    return sum(means) / max(1, len(means))


def kind_of(one: Judged) -> TimeKind:
    """Return the kind of what was measured."""
    return TimeKind.GENERATES if "generation" in one.step.parts else TimeKind.TRAINS


def folds(judged: Sequence[Judged]) -> tuple[list[Fold], Errors]:
    """Leave out each system in turn."""
    errors = Errors(judged)
    found = []
    for system in errors.systems:
        efficiency = errors.fit(system)
        found.append(Fold(system, efficiency, errors.ranges(system), errors.of(system, efficiency)))
    return found, errors


def figures(found: Sequence[Fold]) -> dict[str, float | int | None]:
    """Return the figures over all systems with the same weight, and over rows."""
    by_row = [error for fold in found for error in fold.relative_errors]
    groups = _groups(found)
    inside = [[one for fold in group for one in fold.inside] for group in groups]
    every = [one for group in inside for one in group]
    errors = [[error for fold in group for error in fold.relative_errors] for group in groups]
    with_one = [[error for fold in group for error in fold.errors_with_one_constant] for group in groups]
    return {
        "loo_step_time_error_median": _median(errors),
        "loo_step_time_error_median_by_row": median(by_row) if by_row else None,
        "loo_step_time_error_one_constant": _median(with_one),
        "step_time_in_range": sum(sum(group) / len(group) for group in inside) / len(inside) if inside else None,
        "step_time_in_range_by_row": sum(every) / len(every) if every else None,
    }


def _groups(found: Sequence[Fold]) -> list[list[Fold]]:
    """Return the folds of each system, those with few rows together."""
    groups: dict[str, list[Fold]] = {}
    for fold in found:
        groups.setdefault(fold.system if len(fold.errors) >= _ENOUGH_ROWS else _FEW, []).append(fold)
    return list(groups.values())


def _median(groups: Sequence[Sequence[float]]) -> float | None:
    weighted = [(error, 1 / len(errors)) for errors in groups for error in errors]
    return weighted_quantile(weighted, 0.5) if weighted else None


def write(console: Console, found: Sequence[Fold], errors: Errors) -> None:
    """Print the errors of each system that was left out, and the constants and ranges of all systems."""
    table = Table("left out", "times", "median error", "with one constant", "in range", "measured / predicted")
    for fold in found:
        own = fold.errors_with_one_constant
        cells = [median(fold.relative_errors), median(own) if own else None, sum(fold.inside) / len(fold.inside)]
        cells.append(exp(median(error for _, error in fold.errors)))
        table.add_row(fold.system, str(len(fold.errors)), *("" if v is None else f"{v:.2f}" for v in cells))
    console.print(table)
    fitted = errors.fit()
    same = "the defaults" if fitted == Efficiency() else str(fitted)
    console.print(f"time constants from all systems: {same}", highlight=False)
    changed = {fold.system for fold in found if fold.efficiency != fitted}
    console.print(f"other time constants without: {', '.join(sorted(changed)) or 'none'}", highlight=False)
    for kind, band in errors.ranges().items():
        console.print(f"range {kind}: measured {band.low:.2f} to {band.high:.2f} of predicted", highlight=False)
