"""Compare predicted memory with published runs: which fit, which ran out of memory, and what was measured."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.published.cases import Case
from benchmarks.published.rows import Row
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.allocator import Allocator, allocator_of
from rlflow.resources.memory.overheads import CONTEXT_GIB, NCCL_GIB, asleep_terms, sync_terms
from rlflow.resources.memory.phases import StepLimits, cached_gib, generate_memory, update_terms, usable_gib
from rlflow.resources.memory.state import Terms, TrainingMemory, state_terms
from rlflow.resources.models.lora import adapter_parameters
from rlflow.resources.planner.confidence import Band, Kind, Verdict, kind_of

Allocators = Callable[[Layout], Allocator]
"""The allocator of a role with a layout."""

_MAX_BATCHED_TOKENS = 8192


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
    update_range: tuple[float, float]
    """The least and the most for what a row does not give: lengths, and the parts in which weights are sent."""

    @property
    def update_gib(self) -> float:
        return sum(self.update.values())

    @property
    def fits(self) -> bool:
        """Return whether the case fits its GPU, which must be known."""
        one = replace(self, update_range=(self.update_gib, self.update_gib))
        return one.verdict(Band(1.0, 1.0)) is Verdict.FITS

    def verdict(self, band: Band) -> Verdict:
        """Return the verdict for a GPU, which must be known.

        An engine's share of its GPU is exact, so that only what trains has a band, also while it rests. Where lengths
        or other choices are unknown, all of them must fit, or none.
        """
        assert self.limit is not None
        generate = self.generate or {}
        resting = sum(gib for name, gib in generate.items() if name.startswith("resting "))
        engine = sum(generate.values()) - resting
        if not self.has_room or engine > self.limit:
            return Verdict.DOES_NOT_FIT
        sync = sum((self.sync or {}).values())
        updates = {band.verdict(max(gib, sync), self.limit) for gib in self.update_range}
        update = updates.pop() if len(updates) == 1 else Verdict.TIGHT
        return max(update, band.verdict(resting, self.limit - engine), key=list(Verdict).index)


def predict(case: Case, allocators: Allocators = allocator_of) -> Prediction:
    model, library, allocator = case.model, case.habits, allocators(case.train)

    def terms(tokens: float) -> dict[str, float]:
        accumulates = case.accumulates
        return update_terms(model, case.train, case.training, tokens, accumulates=accumulates, allocator=allocator)

    tokens = float(case.train.micro_batch_tokens)
    alone = update = terms(tokens)
    cached = cached_gib(model, case.train, case.training, tokens, accumulates=case.accumulates, allocator=allocator)
    others = _others(case)
    update = update | others
    generate, sync, has_room = None, None, True
    if case.rollout is not None and case.memory_gib and library.serves_with_share:
        share = case.rollout.gpu_memory_utilization or library.utilization
        engine = generate_memory(
            model,
            replace(case.rollout, gpu_memory_utilization=share),
            case.memory_gib,
            StepLimits(max_batched_tokens=_MAX_BATCHED_TOKENS),
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
            width, is_eager = case.rollout.tensor_parallel_size, case.rollout.eager is True
            left = asleep_terms(model, width, eager=is_eager) if library.engine_sleeps else engine.terms
            if case.training.lora is None:  # with adapters the engine has the rest already
                sync = sync_terms(model, case.train, case.training, case.rollout, weight_bytes=library.engine_bytes)
            if not library.engine_process:
                left = {name: gib for name, gib in left.items() if name != "context"}
                left["nccl"] = max(0.0, left["nccl"] - (NCCL_GIB if update["nccl"] else 0.0))
            update |= {f"engine {name}": gib for name, gib in left.items()}
    beside = sum(update.values()) - sum(alone.values())
    least, most = (sum((alone if size == tokens else terms(size)).values()) + beside for size in case.token_range)
    if library.may_gather_all:
        sent = sync_terms(model, case.train, case.training, case.rollout if case.colocated else None)
        everything = 2 * (model.num_parameters + model.num_encoder_parameters) / GIB
        everything *= 1 + allocator.fragmentation
        most = max(most, sum(sent.values()) - sent["gathered"] + everything)
    limit = usable_gib(case.memory_gib) if case.memory_gib else None
    kind = kind_of(case.train, case.training)
    return Prediction(update, generate, sync, has_room, limit, cached, kind, (least, most))


def _others(case: Case) -> dict[str, float]:
    """Return the memory of other models on the policy's GPUs, as large as the policy: frozen in bf16, or idle.

    Adapters are in fp32.
    """
    frozen = TrainingMemory(gradients=0, optimizer=0)
    layout = replace(case.train, offload="none")
    reference = case.habits.references * state_terms(case.model, layout, frozen)["weights"]
    if case.habits.reference_adapters and case.training.lora is not None:
        reference += 4 * adapter_parameters(case.model, case.training.lora) / GIB
    critic = case.habits.critics * sum(state_terms(case.model, case.train, case.training).values())
    return {"reference": reference, "critic": critic}


# --- what a row is evidence of


_OUT_OF_SCOPE = {
    r"(no|without) flash attention": "attention that keeps its scores",
    r"unified memory|unified cpu": "memory that the CPU shares",
    r"setup fault|far above max_tokens_per_gpu|vendor page says \S+ fits": "a failure whose cause may be software",
    r"/pending/": "held back by its authors",
}
"""Patterns in notes and paths of rows that say nothing about the memory model, with the reason."""


def unfit(case: Case) -> str | None:
    """Return why a case says nothing about memory; None if it does."""
    row = case.row
    if case.unknown:
        return f"not given: {', '.join(sorted(case.unknown))}"
    for said, reason in _OUT_OF_SCOPE.items():
        if re.search(said, row.text):
            return reason
    peak = _measured(row)
    if peak is not None and state_terms(case.model, case.train, case.training)["weights"] > peak:
        return "a peak below the weights that each GPU is said to hold"
    is_inferred = row.outcome == "oom_inferred" and case.memory_gib is not None
    if not (_decides(case) or is_inferred or _measured(row) is not None or _bound(row) is not None):
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
    # litgpt prints what torch allocated, in units of 1e9 bytes (finetune/lora.py).
    return row.peak_mem_gb * 1e9 / GIB if "litgpt" in kind else row.peak_mem_gb


def _bound(row: Row) -> float | None:
    kind = row.peak_mem_kind.lower()
    holds_engine = row.placement.startswith("coloc") and bool(row.rollout_engine) and "oom" not in kind
    if row.peak_mem_gb is None or not ("bound" in kind or (holds_engine and "equals" not in kind)):
        return None
    return row.peak_mem_gb


def _whole_device(row: Row) -> float | None:
    """Return what nvidia-smi showed beside the memory that torch allocated, if a row has both."""
    shown = re.search(r"allocated.*nvidia-smi ([\d.]+)", row.peak_mem_kind)
    return float(shown[1]) if shown and row.outcome == "ok" else None


def comparable(case: Case, prediction: Prediction, kind: str = "") -> float:
    """Return the part of the prediction that a kind of measurement covers; by default the kind of the row's.

    The driver refuses what exceeds the GPU, so that no more than its limit is ever reserved.
    """
    kind = kind or case.row.peak_mem_kind.lower()
    unseen: set[str] = set()
    if re.search("alloc|active|litgpt|torchtune", kind):
        unseen = {"context", "nccl", "fragmentation"}
        unseen |= {term for term in prediction.update if term.startswith("engine ")}
    elif "reserved" in kind and "whole device" not in kind:
        unseen = {"context", "nccl"}
    seen = sum(gib for term, gib in prediction.update.items() if term not in unseen)
    if "fragmentation" in unseen or prediction.limit is None:
        return seen if "fragmentation" in unseen else seen + prediction.cached
    return max(seen, min(seen + prediction.cached, prediction.limit - (prediction.update_gib - seen)))


# --- figures


@dataclass(frozen=True)
class Judged:
    case: Case
    prediction: Prediction
    outcome: bool | None
    """True if the run fitted into memory; None if that is unclear."""
    measured: float | None
    bound: float | None
    whole_device: float | None
    """The reading of nvidia-smi, for rows whose ``measured`` is the memory that torch allocated."""

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
        judged.append(
            Judged(
                case, predict(case, allocators), outcome, _measured(case.row), _bound(case.row), _whole_device(case.row)
            )
        )
    return judged, skipped


def figures(judged: Sequence[Judged]) -> dict[str, float | int | None]:
    died = [one.prediction.fits for one in judged if one.outcome is False]
    ran = [one.prediction.fits for one in judged if one.outcome is True]
    errors = [abs(one.error) for one in judged if one.error is not None]
    bounds = [one for one in judged if one.bound is not None]
    inferred = [one.prediction.fits for one in judged if one.case.row.outcome == "oom_inferred"]
    over = [one for one in bounds if one.bound and comparable(one.case, one.prediction) > one.bound]
    return {
        "oom_recall": died.count(False) / len(died) if died else None,
        "oom_rows": len(died),
        "inferred_oom_recall": inferred.count(False) / len(inferred) if inferred else None,
        "false_oom_rate": ran.count(False) / len(ran) if ran else None,
        "working_rows": len(ran),
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
