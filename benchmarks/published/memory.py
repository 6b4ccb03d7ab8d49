"""Compare predicted memory with published runs: which fit, which ran out of memory, and what was measured."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from statistics import median
from typing import Any

from benchmarks.published.cases import Case, case_of
from benchmarks.published.rows import Row
from rlflow.resources.layout import Layout
from rlflow.resources.memory.allocator import Allocator, allocator_of
from rlflow.resources.memory.overheads import CONTEXT_GIB, asleep_terms, sync_terms
from rlflow.resources.memory.phases import cached_gib, generate_memory, update_terms, usable_gib
from rlflow.resources.memory.state import Terms, TrainingMemory, state_terms
from rlflow.resources.planner.confidence import Band, Kind, Verdict, kind_of

Allocators = Callable[[Layout], Allocator]
"""The allocator of a role with a layout."""

_MAX_BATCHED_TOKENS = 8192
# Columns that a bisection may search, in order: the first one that differs was searched.
_SEARCHED = ("micro_batch_per_gpu", "max_tokens_per_gpu", "max_response_len", "max_total_len")
_OUTCOMES = {"id", "outcome", "notes", "prompts_per_step", "train_batch", "mini_batch", *_SEARCHED}


@dataclass(frozen=True)
class Prediction:
    update: Terms
    """Peak of a training GPU, including what other roles keep on it."""
    generate: Terms | None
    """The same of a generating GPU."""
    sync: Terms | None
    """Memory of a GPU that both use, during a weight sync between them."""
    has_room: bool
    """True if the engine's weights fit into its share."""
    limit: float | None
    """GiB of the GPU that can be allocated."""
    cached: float
    """GiB that the allocator keeps besides ``update`` as long as there is room."""
    kind: Kind

    @property
    def update_gib(self) -> float:
        return sum(self.update.values())

    @property
    def fits(self) -> bool:
        """Return whether the case fits its GPU, which must be known."""
        return self.verdict(Band(1.0, 1.0)) is Verdict.FITS

    def verdict(self, band: Band) -> Verdict:
        """Return the verdict for a GPU, which must be known.

        An engine's share of its GPU is exact, so that only what trains has a band.
        """
        assert self.limit is not None
        engine = sum(self.generate.values()) if self.generate is not None else 0.0
        if not self.has_room or engine > self.limit:
            return Verdict.DOES_NOT_FIT
        return band.verdict(max(self.update_gib, sum((self.sync or {}).values())), self.limit)


def predict(case: Case, allocators: Allocators = allocator_of) -> Prediction:
    model, library, allocator = case.model, case.habits, allocators(case.train)
    tokens = float(case.train.micro_batch_tokens)
    update = dict(
        update_terms(model, case.train, case.training, tokens, accumulates=case.accumulates, allocator=allocator)
    )
    cached = cached_gib(model, case.train, case.training, tokens, accumulates=case.accumulates, allocator=allocator)
    others = _others(case)
    update |= others
    generate, sync, has_room = None, None, True
    if case.rollout is not None and case.memory_gib and library.serves_with_share:
        share = case.rollout.gpu_memory_utilization or library.utilization
        engine = generate_memory(
            model,
            replace(case.rollout, gpu_memory_utilization=share),
            case.memory_gib,
            max_batched_tokens=_MAX_BATCHED_TOKENS,
            weight_bytes=library.engine_bytes,
        )
        generate = dict(engine.terms)
        # Most of the published versions of engines made CUDA graphs besides their share, and let it be less than they
        # need at first sight when fewer tokens go through at once.
        has_room = generate["weights"] + generate["context"] < share * case.memory_gib
        if case.colocated:
            policy = {"context": CONTEXT_GIB} if library.engine_process else {}
            policy |= {} if library.offloads_policy else others
            if not library.offloads_policy:
                resting = case.training if case.training.keeps_gradients else replace(case.training, gradients=0)
                policy |= state_terms(model, case.train, resting)
            generate |= {f"resting {name}": gib for name, gib in policy.items()}
            left = asleep_terms(model, case.rollout.tensor_parallel_size) if library.engine_sleeps else engine.terms
            if case.training.lora is None:  # with adapters the engine has the rest already
                sync = sync_terms(model, case.train, case.training, case.rollout, weight_bytes=library.engine_bytes)
            if not library.engine_process:
                left = {name: gib for name, gib in left.items() if name != "context"}
            update |= {f"engine {name}": gib for name, gib in left.items()}
    limit = usable_gib(case.memory_gib) if case.memory_gib else None
    kind = kind_of(case.train, case.training, beside_engine=case.colocated)
    return Prediction(update, generate, sync, has_room, limit, cached, kind)


def _others(case: Case) -> dict[str, float]:
    """Return the memory of other models on the policy's GPUs, as large as the policy: frozen in bf16, or idle."""
    frozen = TrainingMemory(gradients=0, optimizer=0)
    layout = replace(case.train, offload="none")
    reference = case.habits.references * state_terms(case.model, layout, frozen)["weights"]
    critic = case.habits.critics * sum(state_terms(case.model, case.train, case.training).values())
    return {"reference": reference, "critic": critic}


# --- what a row is evidence of


def unfit(case: Case) -> str | None:
    """Return why a case says nothing about memory; None if it does."""
    row = case.row
    if case.unknown:
        return f"not given: {', '.join(sorted(case.unknown))}"
    if not _decides(case) and _measured(row) is None and _bound(row) is None:
        return "no GPU named" if case.gpu is None else "neither outcome nor memory"
    return None


def _decides(case: Case) -> bool:
    """Return whether the row says clearly that it fits its GPU or that it does not."""
    return case.memory_gib is not None and case.row.outcome in ("ok", "ok_ci", "oom") and not is_contested(case.row)


def is_contested(row: Row) -> bool:
    return bool(
        re.search(r"not stated|not in the excerpt|intermittent|later main|contradict|with and without", row.text)
    )


def _measured(row: Row) -> float | None:
    """Return the GiB that a successful run measured on a training GPU. The GB that tools print are GiB."""
    kind = row.peak_mem_kind.lower()
    if not row.peak_mem_gb or row.outcome.startswith("oom") or re.search(r"equals card|bound|at oom", kind):
        return None
    if row.gpu_mem_gb and row.peak_mem_gb > 0.97 * row.gpu_mem_gb:
        return None
    if row.placement.startswith("coloc") and row.rollout_engine and "training window" not in kind:
        return None
    return row.peak_mem_gb


def _bound(row: Row) -> float | None:
    kind = row.peak_mem_kind.lower()
    holds_engine = row.placement.startswith("coloc") and bool(row.rollout_engine) and "oom" not in kind
    if row.peak_mem_gb is None or not ("bound" in kind or (holds_engine and "equals" not in kind)):
        return None
    return row.peak_mem_gb


def comparable(case: Case, prediction: Prediction) -> float:
    """Return the part of the prediction that the row's kind of measurement covers.

    The driver refuses what exceeds the GPU, so that no more than its limit is ever reserved.
    """
    kind = case.row.peak_mem_kind.lower()
    unseen: set[str] = set()
    if "alloc" in kind or "active" in kind:
        unseen = {"context", "nccl", "fragmentation"}
        unseen |= {term for term in prediction.update if term.startswith("engine ")}
    elif "reserved" in kind:
        unseen = {"context", "nccl"}
    seen = sum(gib for term, gib in prediction.update.items() if term not in unseen)
    if "fragmentation" in unseen or prediction.limit is None:
        return seen if "fragmentation" in unseen else seen + prediction.cached
    return max(seen, min(seen + prediction.cached, prediction.limit - (prediction.update_gib - seen)))


@dataclass(frozen=True)
class Boundary:
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
        if name is None or not ran or isinstance(case_of(ran[0]), Case) is False:
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


# --- figures


@dataclass(frozen=True)
class Judged:
    case: Case
    prediction: Prediction
    outcome: bool | None
    """True if the run fitted into memory; None if that is unclear."""
    measured: float | None
    bound: float | None

    @property
    def error(self) -> float | None:
        """Return the relative error with its sign."""
        return None if self.measured is None else comparable(self.case, self.prediction) / self.measured - 1


def judge(cases: Sequence[Case], allocators: Allocators = allocator_of) -> tuple[list[Judged], dict[str, str]]:
    """Return the cases that say something about memory, and the reasons why others do not, by id."""
    judged, skipped = [], {}
    for case in cases:
        reason = unfit(case)
        if reason:
            skipped[case.row.id] = reason
            continue
        outcome = case.row.outcome != "oom" if _decides(case) else None
        judged.append(Judged(case, predict(case, allocators), outcome, _measured(case.row), _bound(case.row)))
    return judged, skipped


def figures(judged: Sequence[Judged], found: Sequence[Boundary]) -> dict[str, float | int | None]:
    died = [one.prediction.fits for one in judged if one.outcome is False]
    ran = [one.prediction.fits for one in judged if one.outcome is True]
    errors = [abs(one.error) for one in judged if one.error is not None]
    bounds = [one for one in judged if one.bound is not None]
    over = [one for one in bounds if one.bound and comparable(one.case, one.prediction) > one.bound]
    return {
        "oom_recall": died.count(False) / len(died) if died else None,
        "oom_rows": len(died),
        "false_oom_rate": ran.count(False) / len(ran) if ran else None,
        "working_rows": len(ran),
        "boundary_error_max": max((one.error for one in found), default=None),
        "boundaries": len(found),
        "memory_error_median": median(errors) if errors else None,
        "memory_rows": len(errors),
        "bounds_violated": len(over) if bounds else None,
        "bounds": len(bounds),
    }


def worst(judged: Sequence[Judged]) -> Mapping[str, list[Judged]]:
    """Return the largest errors of each kind."""
    return {
        "predicted not to fit, but ran": [one for one in judged if one.outcome is True and not one.prediction.fits],
        "predicted to fit, but ran out of memory": [
            one for one in judged if one.outcome is False and one.prediction.fits
        ],
        "memory": sorted((one for one in judged if one.error is not None), key=lambda one: -abs(one.error or 0)),
    }


def line(one: Judged) -> str:
    """Return a row's prediction with its terms as text."""
    row, train = one.case.row, one.case.train
    made_of = ", ".join(f"{term} {gib:.1f}" for term, gib in one.prediction.update.items() if gib >= 0.05)
    seen = f"{one.measured:.1f}" if one.measured is not None else f"a limit of {one.prediction.limit or 0:.1f}"
    error = f" ({one.error:+.0%})" if one.error is not None else ""
    return (
        f"{row.id} {row.system} {row.model} on {row.n_gpus}, {train.micro_batch_tokens} tokens: "
        f"{one.prediction.update_gib:.1f} GiB for {seen}{error} = {made_of}"
    )


def boundary_line(boundary: Boundary) -> str:
    return (
        f"boundary {boundary.ids[0]} to {boundary.ids[-1]}, {boundary.searched}: {boundary.predicted} predicted, "
        f"{boundary.true} ran, {boundary.smallest_that_died} ran out of memory"
    )
