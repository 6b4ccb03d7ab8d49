"""The prediction of a plan: what it needs, how long it takes, and why it was chosen, as plain figures for plan.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.resources.memory.state import Terms
from rlflow.resources.planner.candidate import Candidate, RejectedCandidate, SearchResult
from rlflow.resources.planner.confidence import TIME_BANDS, Margin, TimeKind, Verdict
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.pools import Partition, describe_pools
from rlflow.resources.planner.prediction.data_placement import DataPrediction, predict_data
from rlflow.resources.planner.prediction.node_times import (
    NodeTime,
    checkpoint_seconds,
    evaluation_seconds,
    node_times,
)
from rlflow.resources.planner.prediction.overlap_prediction import OverlapPrediction, predict_overlap, step_seconds
from rlflow.resources.planner.prediction.plan_memory import RoleMemory, find_headroom, length_limits, role_memory
from rlflow.resources.planner.prediction.process_memory import memory_of_hosts, predict_processes
from rlflow.resources.planner.prediction.risks import plan_risks
from rlflow.resources.planner.prediction.warnings import plan_warnings
from rlflow.resources.time.calibration import calibration_figures

# How another way to share GPUs is less safe.
_RISKS = {Margin.EXPECTED: "tight", Margin.POSSIBLE: "likely out of memory"}


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to share GPUs, and what it costs."""

    what: str
    step_seconds: float | None
    """None: it does not fit."""
    loses: str


def find_alternatives(inputs: PlannerInputs, result: SearchResult, step: float) -> tuple[Alternative, ...]:
    """Return the best of every other way to share, fastest first; then the ways that do not fit."""
    chosen = result.candidate
    best: dict[Partition, Candidate] = {}
    for other in result.alternatives:
        if other.partition != chosen.partition or other.used_gpus < chosen.used_gpus:
            best.setdefault(other.partition, other)
    times = {way: step_seconds(other, inputs) for way, other in best.items()}
    alternatives = []
    for way, other in sorted(best.items(), key=lambda entry: (entry[1].margin, times[entry[0]])):
        idle = max(other.schedule.idle_share(index) for index in range(len(way)))
        loses = _describe_time(times[way] / step - 1 if step else 0.0)
        if not loses:
            loses = "equally fast" if other.used_gpus == chosen.used_gpus else f"uses {other.used_gpus} GPUs"
        loses += f", idle {idle:.0%}" if len(way) > 1 else ""
        loses += f", {_RISKS[other.margin]}" if other.margin > chosen.margin else ""
        what = describe_pools(way, other.gpus)
        alternatives.append(Alternative(what=what, step_seconds=times[way], loses=loses))
    for rejected in _nearest(result.rejected):
        if rejected.partition not in {*best, chosen.partition}:
            what = describe_pools(rejected.partition, rejected.gpus)
            alternatives.append(Alternative(what=what, step_seconds=None, loses=str(rejected.shortage)))
    return tuple(alternatives)


def _describe_time(slower: float) -> str:
    """Return how much longer or shorter a step takes; nothing where it makes no difference."""
    if abs(slower) < 0.005:
        return ""
    return f"{slower:.0%} slower" if slower > 0 else f"{-slower:.0%} less time"


def _nearest(rejected: Sequence[RejectedCandidate]) -> list[RejectedCandidate]:
    """Return, for every way to share, the rejected candidate with the smallest shortage."""
    nearest: dict[object, RejectedCandidate] = {}
    for one in rejected:
        if one.partition not in nearest or one.shortage.gib < nearest[one.partition].shortage.gib:
            nearest[one.partition] = one
    return list(nearest.values())


@dataclass(frozen=True, kw_only=True)
class PoolTime:
    """The idle time of a pool."""

    roles: tuple[str, ...]
    gpus: int
    idle_share: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """All predicted figures of a plan."""

    verdict: Verdict | None
    """The verdict on memory, given how wrong such predictions are; None where memory is not modelled."""
    risks: tuple[str, ...]
    """Why the plan is tight."""
    safer_with: tuple[str, ...] = ()
    """Changes to the recipe or the cluster of which each makes a tight plan safe."""
    step_seconds: float
    step_seconds_range: tuple[float, float]
    """The expected range of the step time; about eight of ten published runs were in theirs."""
    evaluation_seconds: float
    """The time of one evaluation."""
    checkpoint_seconds: float
    """The time of one checkpoint."""
    tokens_per_second_per_gpu: float
    num_gpus: int
    """GPUs in use."""
    memory: Mapping[str, RoleMemory]
    nodes: Mapping[str, NodeTime]
    pools: tuple[PoolTime, ...]
    headroom_gib: float | None
    """Free memory of the fullest GPU; None where memory is not modelled."""
    fullest: str
    """The fullest GPU: its host, number and phase."""
    host_gib: Mapping[str, float]
    """Memory of each host, for offloaded and sleeping roles and for data between roles."""
    data: DataPrediction
    reasons: tuple[str, ...]
    limits: tuple[str, ...]
    """The role that runs out of memory first, and the response length from which it does."""
    warnings: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    processes: Mapping[str, Mapping[str, Terms]]
    """GiB of each process, by phase and purpose: on a GPU what torch reserves, on a CPU what is resident."""
    calibration: Mapping[str, Mapping[str, Any]]
    """The measured figures that the plan is based on, as in the file of ``calibration=``."""
    overlap: OverlapPrediction | None = None
    """The overlap of generation and training; None for synchronous steps."""


def predict(inputs: PlannerInputs, result: SearchResult) -> Prediction:
    """Return all figures of the plan that a search has found."""
    candidate = result.candidate
    schedule, overlap = candidate.schedule, predict_overlap(candidate, inputs)
    step = overlap.step_seconds if overlap else schedule.step_seconds
    generates = any(task.kind == "generate" for task in inputs.workload.tasks)
    band = TIME_BANDS[TimeKind.GENERATES if generates else TimeKind.TRAINS]
    gpus = len({bundle for placement in result.roles.values() for bundle in placement.bundles})
    memory = {role: role_memory(inputs, result, role) for role in result.roles}
    headroom, fullest = find_headroom(inputs, memory)
    host_gib = memory_of_hosts(result.roles, {role: of_role.host_gib for role, of_role in memory.items()})
    nodes = node_times(inputs, result)
    safe = Verdict.FITS if candidate.margin is Margin.SAFE else Verdict.TIGHT
    return Prediction(
        verdict=None if headroom is None else safe,
        risks=plan_risks(inputs, result, host_gib),
        step_seconds=step,
        step_seconds_range=(step * band.low, step * band.high),
        evaluation_seconds=evaluation_seconds(inputs, result),
        checkpoint_seconds=checkpoint_seconds(inputs),
        tokens_per_second_per_gpu=inputs.workload.generated_tokens / step / gpus if step else 0.0,
        num_gpus=gpus,
        memory=memory,
        nodes=nodes,
        pools=tuple(
            PoolTime(
                roles=roles,
                gpus=count,
                idle_share=overlap.idle_share(candidate, index, inputs) if overlap else schedule.idle_share(index),
            )
            for index, (roles, count) in enumerate(zip(candidate.partition, candidate.gpus, strict=True))
        ),
        headroom_gib=headroom,
        fullest=fullest,
        host_gib=host_gib,
        data=predict_data(inputs.workload, result.roles, inputs.cluster.hosts[0].name),
        reasons=_reasons(candidate, overlap),
        limits=length_limits(inputs, candidate),
        warnings=plan_warnings(inputs, result, nodes),
        alternatives=find_alternatives(inputs, result, step),
        processes=predict_processes(inputs, result.roles, {role: of_role.phases for role, of_role in memory.items()}),
        calibration=calibration_figures(inputs.calibration),
        overlap=overlap,
    )


def _reasons(candidate: Candidate, overlap: OverlapPrediction | None) -> tuple[str, ...]:
    """Describe what the step time consists of, and how idle each pool is."""
    schedule = candidate.schedule
    if overlap is not None:
        return overlap.reasons
    step = schedule.step_seconds
    if not step:
        return ()
    spans = {span.node: span for span in schedule.spans}
    alone, before = {}, 0.0
    for node in schedule.critical_path:
        # Streaming nodes overlap the node before them.
        alone[node] = max(0.0, spans[node].end - max(before, spans[node].start))
        before = spans[node].end
    longest = sorted(alone, key=lambda node: -alone[node])
    shares = [f"{node} {alone[node] / step:.0%}" for node in longest if alone[node] > 0.05 * step]
    reasons = [f"step time is {', '.join(shares)}"]
    if len(candidate.partition) > 1:
        idle = [
            f"{' + '.join(roles)} {schedule.idle_share(index):.0%}" for index, roles in enumerate(candidate.partition)
        ]
        reasons.append(f"idle: {', '.join(idle)}")
    return tuple(reasons)
