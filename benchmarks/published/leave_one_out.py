"""Judge each system of published runs with constants and error bands that were fitted without it.

The constants are the shares that torch's allocator caches on one GPU and on several. A band is the range of measured
over predicted memory of the other systems, each of them predicted without itself as well. However many rows a system
has, they weigh as much as ten.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.published import boundaries, memory
from benchmarks.published.cases import Case
from benchmarks.published.memory import Judged
from benchmarks.published.rows import Row
from rlflow.resources.layout import Layout
from rlflow.resources.memory.allocator import Allocator, allocator_of
from rlflow.resources.planner.confidence import Band, Kind, Verdict

GRID = tuple(eighths / 8 for eighths in range(9))
"""The shares to choose from, on one GPU and on several."""
COVERED = (0.05, 0.95)
"""The quantiles at the ends of a band."""
_ENOUGH_SYSTEMS, _ENOUGH_ROWS = 3, 10
"""A kind of configuration that fewer systems have measured, or with fewer rows, gets the band of all kinds."""
LARGE = 10
"""A system needs so many used rows to be named as the worst, and has no more weight than these."""


def system_of(row: Row) -> str:
    """Return the name of the row's system without the name of what it builds on."""
    return row.system.split("(")[0].strip()


@dataclass(frozen=True)
class Fitted:
    """The constants that some systems give, as indices of the grid."""

    alone: int
    sharded: int

    def index(self, layout: Layout) -> int:
        """Return the index for a role with a layout."""
        return self.sharded if layout.num_gpus > 1 else self.alone

    def allocator(self, layout: Layout) -> Allocator:
        """Return the allocator of a role with a layout."""
        return replace(allocator_of(layout), cached=GRID[self.index(layout)])

    def __str__(self) -> str:
        return f"cached on one GPU {GRID[self.alone]}, on several {GRID[self.sharded]}"


@dataclass(frozen=True)
class Fold:
    """A system that was left out, and what the other systems say of it."""

    system: str
    fitted: Fitted
    bands: Mapping[Kind, Band]
    judged: tuple[Judged, ...]

    def verdict(self, one: Judged) -> Verdict:
        """Return the verdict on a row of the system, whose GPU must be known."""
        return one.prediction.verdict(self.bands[one.prediction.kind])

    def rate(self, outcome: bool, test: Callable[[Verdict], bool]) -> float | None:
        """Return the share of runs with an outcome whose verdict passes a test; None without such runs."""
        verdicts = [self.verdict(one) for one in self.judged if one.outcome is outcome]
        return sum(map(test, verdicts)) / len(verdicts) if verdicts else None

    @property
    def oom_recall(self) -> float | None:
        """Return the share of runs out of memory that are not said to fit."""
        return self.rate(False, lambda verdict: verdict is not Verdict.FITS)

    @property
    def false_oom(self) -> float | None:
        """Return the share of working runs that are said not to fit."""
        return self.rate(True, lambda verdict: verdict is Verdict.DOES_NOT_FIT)

    @property
    def tight(self) -> float | None:
        """Return the share of working runs that are said to be tight."""
        return self.rate(True, lambda verdict: verdict is Verdict.TIGHT)

    @property
    def memory_error(self) -> float | None:
        """Return the median relative error of measured memory."""
        errors = self.errors
        return median(errors) if errors else None

    @property
    def errors(self) -> list[float]:
        """Return the relative errors of measured memory, without their signs."""
        return [abs(one.error) for one in self.judged if one.error is not None]


@dataclass(frozen=True)
class Evidence:
    """A row's measured memory over the predicted one, as logarithms for every share of the grid."""

    system: str
    kind: Kind
    layout: Layout
    ratios: tuple[float, ...]
    is_allocated: bool
    """False for the reading of the whole device beside what was allocated: memory in it that the allocator caches is
    given back where memory runs out, so that its error is no error of what fits."""


class Errors:
    """The errors of all rows for every share of the grid."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._rows = [evidence for case in cases for evidence in _evidence(case)]
        self._fit = cache(self._fit_without)

    def fit(self, *without: str) -> Fitted:
        """Return the shares with the smallest mean error over systems, some of which are left out."""
        return self._fit(frozenset(without))

    def _fit_without(self, without: frozenset[str]) -> Fitted:
        alone, sharded = [
            [row for row in self._rows if row.system not in without and (row.layout.num_gpus > 1) is several]
            for several in (False, True)
        ]
        return Fitted(_best(alone), _best(sharded))

    def bands(self, *without: str) -> Mapping[Kind, Band]:
        """Return the bands of systems that are not left out, each of them predicted without itself."""
        found: list[tuple[str, Kind, float]] = []
        for row in self._rows:
            if row.system not in without and row.is_allocated:
                index = self.fit(row.system, *without).index(row.layout)
                found.append((row.system, row.kind, row.ratios[index]))
        bands = {}
        for kind in Kind:
            mine = [(system, ratio) for system, of, ratio in found if of is kind]
            enough = len({system for system, _ in mine}) >= _ENOUGH_SYSTEMS and len(mine) >= _ENOUGH_ROWS
            bands[kind] = _band(mine if enough else [(system, ratio) for system, _, ratio in found])
        return bands


def _evidence(case: Case) -> Iterator[Evidence]:
    """Yield what a row says of memory and, where it has that besides, of the whole device.

    Rows that do not give their lengths, or what kind of memory they measured, are no evidence: their error is also
    that of the guess.
    """
    least, most = case.token_range
    if "kind not said" in case.row.peak_mem_kind:
        return
    judged, _ = memory.judge([case])
    if not judged or most > least:
        return
    predictions = [memory.predict(case, Fitted(index, index).allocator) for index in range(len(GRID))]
    for measured, reading in ((judged[0].measured, ""), (judged[0].whole_device, "nvidia-smi")):
        if measured is not None:
            ratios = (log(measured / memory.comparable(case, prediction, reading)) for prediction in predictions)
            kind = judged[0].prediction.kind
            yield Evidence(system_of(case.row), kind, case.train, tuple(ratios), is_allocated=not reading)


def _best(rows: Sequence[Evidence]) -> int:
    """Return the index with the smallest weighted error."""
    weights = _row_weights(row.system for row in rows)
    return min(range(len(GRID)), key=lambda index: sum(weights[row.system] * abs(row.ratios[index]) for row in rows))


def _row_weights(systems: Iterable[str]) -> Mapping[str, float]:
    """Return the weight of a row of each system: together the rows of a large system weigh as much as ten."""
    return {system: min(count, LARGE) / count for system, count in Counter(systems).items()}


def _band(ratios: Sequence[tuple[str, float]]) -> Band:
    """Return the band of ratios by system; it contains 1."""
    weights = _row_weights(system for system, _ in ratios)
    weighted = [(ratio, weights[system]) for system, ratio in ratios]
    low, high = (weighted_quantile(weighted, share) for share in COVERED)
    return Band(exp(min(0.0, low)), exp(max(0.0, high)))


def weighted_quantile(weighted: Iterable[tuple[float, float]], share: float) -> float:
    """Return the smallest value up to which the values have at least a ``share`` of all weight."""
    ordered = sorted(weighted)
    total, seen = sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        seen += weight
        if seen >= share * total:
            return value
    raise ValueError("expected a share of at most 1")


def folds(cases: Sequence[Case]) -> tuple[list[Fold], Errors]:
    """Leave out each system in turn."""
    errors = Errors(cases)
    mine: dict[str, list[Case]] = {}
    for case in cases:
        mine.setdefault(system_of(case.row), []).append(case)
    found = []
    for system, own in sorted(mine.items()):
        fitted = errors.fit(system)
        judged, _ = memory.judge(own, fitted.allocator)
        if judged:
            found.append(Fold(system, fitted, errors.bands(system), tuple(judged)))
    return found, errors


def searched_boundaries(rows: Sequence[Row], found: Sequence[Fold]) -> list[boundaries.Boundary]:
    """Return the boundaries that runs were searched for, each predicted without its own system."""
    allocators = {fold.system: fold.fitted.allocator for fold in found}
    by_system: dict[str, list[Row]] = {}
    for row in rows:
        by_system.setdefault(system_of(row), []).append(row)
    return [
        boundary
        for system, own in by_system.items()
        for boundary in boundaries.boundaries(own, allocators.get(system, allocator_of))
    ]


def figures(found: Sequence[Fold], searched: Sequence[boundaries.Boundary]) -> dict[str, float | int | None]:
    """Return the figures over all systems, and of the worst system with enough rows."""
    large = [fold for fold in found if len(fold.judged) >= LARGE]
    weights = _row_weights(fold.system for fold in found for _ in fold.errors)
    errors = [(error, weights[fold.system]) for fold in found for error in fold.errors]
    return {
        "loo_oom_recall": _mean(found, lambda fold: fold.oom_recall, False),
        "loo_oom_recall_worst": min((rate for fold in large if (rate := fold.oom_recall) is not None), default=None),
        "loo_false_oom": _mean(found, lambda fold: fold.false_oom, True),
        "loo_false_oom_worst": max((rate for fold in large if (rate := fold.false_oom) is not None), default=None),
        "loo_tight_of_working": _mean(found, lambda fold: fold.tight, True),
        "loo_boundary_error_max": max((one.error for one in searched), default=None),
        "loo_memory_error_median": weighted_quantile(errors, 0.5) if errors else None,
        "loo_memory_error_agilerl": next((fold.memory_error for fold in found if fold.system == "agilerl"), None),
    }


def deepspeed_with_vllm(found: Sequence[Fold]) -> list[Fold]:
    """Return the folds reduced to runs that train with DeepSpeed and generate with vLLM, as rlflow does."""
    reduced = []
    for fold in found:
        mine = tuple(one for one in fold.judged if _is_rlflow_like(one.case.row))
        if mine:
            reduced.append(Fold(fold.system, fold.fitted, fold.bands, mine))
    return reduced


def write(console: Console, found: Sequence[Fold], errors: Errors) -> None:
    """Print the figures of each system that was left out, and the constants and bands that all systems give."""
    table = Table("left out", "rows", "out of memory", "recall", "ran", "false", "tight", "measured", "median error")
    both = [replace(fold, system=f"{fold.system}, DeepSpeed + vLLM") for fold in deepspeed_with_vllm(found)]
    for fold in (*found, *both):
        outcomes = [one.outcome for one in fold.judged]
        counts = [len(outcomes), outcomes.count(False), fold.oom_recall, outcomes.count(True)]
        counts += [fold.false_oom, fold.tight, len(fold.errors), fold.memory_error]
        table.add_row(
            fold.system, *("" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in counts)
        )
    console.print(table)
    console.print(f"constants from all systems: {errors.fit()}", highlight=False)
    others = {fold.fitted for fold in found}
    console.print(f"constants without one of them: {len(others)} different", highlight=False)
    for kind, band in errors.bands().items():
        console.print(f"band {kind}: measured {band.low:.2f} to {band.high:.2f} of predicted", highlight=False)


def _is_rlflow_like(row: Row) -> bool:
    trains = f"{row.train_backend} {row.sharding}".lower()
    return "vllm" in row.rollout_engine.lower() and ("deepspeed" in trains or trains.strip().startswith("zero"))


def _mean(found: Iterable[Fold], rate: Callable[[Fold], float | None], outcome: bool) -> float | None:
    """Return the mean of a rate of runs with an outcome; a system weighs as much as ten such rows at most."""
    rows = [(rate(fold), min(LARGE, sum(one.outcome is outcome for one in fold.judged))) for fold in found]
    total = sum(weight for _, weight in rows)
    return sum((value or 0.0) * weight for value, weight in rows) / total if total else None
