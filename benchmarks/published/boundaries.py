"""The largest size that ran, where authors of published runs searched for it, beside the largest predicted to fit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

from benchmarks.published.cases import Case, case_of
from benchmarks.published.memory import Allocators, predict, unfit
from benchmarks.published.rows import Row
from rlflow.resources.memory.allocator import allocator_of

# Columns that a bisection may search, in order: the first one that differs was searched.
_SEARCHED = ("micro_batch_per_gpu", "max_tokens_per_gpu", "max_response_len", "max_total_len")
_OUTCOMES = {"id", "outcome", "notes", "prompts_per_step", "train_batch", "mini_batch", *_SEARCHED}


@dataclass(frozen=True)
class Boundary:
    """A series of runs that differ in one size, of which some ran out of memory."""

    system: str
    ids: tuple[str, ...]
    searched: str
    true: int
    smallest_that_died: int
    predicted: int

    @property
    def error(self) -> float:
        """Return how far the prediction is from the interval of the largest run and the smallest failure."""
        largest = max(self.true, self.smallest_that_died - 1)
        return max(self.true / max(1, self.predicted), self.predicted / largest, 1.0) - 1


def boundaries(rows: Iterable[Row], allocators: Allocators = allocator_of) -> Iterator[Boundary]:
    """Yield, for each series of runs that differ in one size, the largest that ran and the largest predicted to fit."""
    bisected = [row for row in rows if row.evidence == "author_oom_bisect"]
    for _, found in groupby(sorted(bisected, key=_but_size), key=_but_size):
        series = list(found)
        name = next((n for n in _SEARCHED if len({getattr(row, n) for row in series}) > 1), None)
        ran = [row for row in series if row.outcome != "oom"]
        if name is None or not ran or not isinstance(case := case_of(ran[0]), Case) or unfit(case):
            continue
        true = max(getattr(row, name) for row in ran)
        died = min((getattr(row, name) for row in series if row.outcome == "oom"), default=0)
        largest = _largest_that_fits(ran[0], name, 16 * true, allocators)
        yield Boundary(ran[0].system, tuple(row.id for row in series), name, true, died, largest)


def _but_size(row: Row) -> tuple[str, ...]:
    return tuple(str(getattr(row, field.name)) for field in fields(row) if field.name not in _OUTCOMES)


def _largest_that_fits(row: Row, name: str, most: int, allocators: Allocators) -> int:
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        size: dict[str, Any] = {name: middle}
        case = case_of(replace(row, **size))
        fits = isinstance(case, Case) and predict(case, allocators).fits
        low, high = (middle, high) if fits else (low, middle)
    return low


def figures(found: Sequence[Boundary]) -> dict[str, float | int | None]:
    """Return the largest error and the number of series."""
    return {"boundary_error_max": max((one.error for one in found), default=None), "boundaries": len(found)}


def line(boundary: Boundary) -> str:
    """Return a boundary as text."""
    return (
        f"boundary {boundary.ids[0]} to {boundary.ids[-1]}, {boundary.searched}: {boundary.predicted} predicted, "
        f"{boundary.true} ran, {boundary.smallest_that_died} ran out of memory"
    )
