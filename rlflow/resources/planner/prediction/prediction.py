"""The prediction of a plan: what it needs, how long it takes, and why it was chosen, as plain figures for plan.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

from rlflow.resources.memory.phases import score_terms, update_terms
from rlflow.resources.memory.state import Terms
from rlflow.resources.planner.candidate import Candidate, RejectedCandidate, describe_pools
from rlflow.resources.planner.confidence import TIME_BANDS, Margin, TimeKind, Verdict
from rlflow.resources.planner.pool import RoleChoice, host_memory, sync_memory
from rlflow.resources.planner.prediction.data_placement import DataPrediction, predict_data
from rlflow.resources.planner.prediction.node_times import NodeTime, node_times
from rlflow.resources.planner.prediction.overlap_prediction import OverlapPrediction, predict_overlap, step_seconds
from rlflow.resources.planner.prediction.pauses import checkpoint_seconds, evaluation_seconds
from rlflow.resources.planner.prediction.process_memory import memory_of_hosts, predict_processes
from rlflow.resources.planner.prediction.risks import plan_risks
from rlflow.resources.planner.prediction.warnings import plan_warnings
from rlflow.resources.planner.search.layouts import largest_micro_batch
from rlflow.resources.planner.search.search import Search, SearchResult
from rlflow.resources.planner.search.sharing import Partition
from rlflow.resources.time.calibration import calibration_figures
from rlflow.resources.workload import Task


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """The predicted memory of a role."""

    phase: str
    """The phase in which the role needs most: generate, score or update."""
    phases: Mapping[str, Terms]
    """GiB of each of its GPUs by purpose: in that phase, in ``sync`` during a weight sync, and ``resting`` while
    other roles on its GPUs work."""
    peak_gib: Mapping[str, Mapping[int, float]]
    """For each GPU of each host, the peak in that phase, including what idle roles hold there."""
    host_gib: Terms
    """Host memory for each of its GPUs: offloaded and sleeping state, and data in flight."""
    sequences: int | None = None
    """Sequences that one engine generates at once."""


@dataclass(frozen=True, kw_only=True)
class PoolTime:
    """The idle time of a pool."""

    roles: tuple[str, ...]
    gpus: int
    idle_share: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to share GPUs, and what it costs."""

    what: str
    step_seconds: float | None
    """None: it does not fit."""
    loses: str


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


def predict(search: Search, result: SearchResult) -> Prediction:
    """Return all figures of the plan that a search has found."""
    candidate = result.candidate
    schedule, overlap = candidate.schedule, predict_overlap(candidate, search.uses)
    step = overlap.step_seconds if overlap else schedule.step_seconds
    generates = any(task.kind == "generate" for task in search.workload.tasks)
    band = TIME_BANDS[TimeKind.GENERATES if generates else TimeKind.TRAINS]
    gpus = len({bundle for placement in result.roles.values() for bundle in placement.bundles})
    memory = {role: _memory(search, result, role) for role in result.roles}
    headroom, fullest = _headroom(search, memory)
    host_gib = memory_of_hosts(result.roles, {role: found.host_gib for role, found in memory.items()})
    safe = Verdict.FITS if candidate.margin is Margin.SAFE else Verdict.TIGHT
    return Prediction(
        verdict=None if headroom is None else safe,
        risks=plan_risks(search, result, host_gib),
        step_seconds=step,
        step_seconds_range=(step * band.low, step * band.high),
        evaluation_seconds=evaluation_seconds(search, result),
        checkpoint_seconds=checkpoint_seconds(search),
        tokens_per_second_per_gpu=search.workload.generated_tokens / step / gpus if step else 0.0,
        num_gpus=gpus,
        memory=memory,
        nodes=node_times(search, result),
        pools=tuple(
            PoolTime(
                roles=roles,
                gpus=count,
                idle_share=overlap.idle_share(candidate, index, search.uses) if overlap else schedule.idle_share(index),
            )
            for index, (roles, count) in enumerate(zip(candidate.partition, candidate.gpus, strict=True))
        ),
        headroom_gib=headroom,
        fullest=fullest,
        host_gib=host_gib,
        data=predict_data(search.workload, result.roles, search.cluster.hosts[0].name),
        reasons=_reasons(candidate, overlap),
        limits=_limits(search, candidate),
        warnings=plan_warnings(search, result),
        alternatives=_alternatives(search, result, step),
        processes=predict_processes(search, result.roles, {role: found.phases for role, found in memory.items()}),
        calibration=calibration_figures(search.calibration),
        overlap=overlap,
    )


def _memory(search: Search, result: SearchResult, role: str) -> RoleMemory:
    choice = result.candidate.choices[role]
    phases = {choice.phase: choice.awake, "resting": choice.idle}
    phases |= _sync(search, result.candidate, role)
    peaks: dict[str, dict[int, float]] = {}
    on_gpu = {other: set(placement.bundles) for other, placement in result.roles.items() if other != role}
    for bundle in result.roles[role].bundles if choice.awake else ():
        others = (other for other, bundles in on_gpu.items() if bundle in bundles)
        beside = sum(sum(result.candidate.choices[other].idle.values()) for other in others)
        # The sync terms include the engine's own.
        peak = max(sum(choice.awake.values()) + beside, sum(phases.get("sync", {}).values()))
        peaks.setdefault(bundle.host, {})[bundle.gpu] = peak
    return RoleMemory(
        phase=choice.phase,
        phases={phase: {term: gib for term, gib in terms.items() if gib} for phase, terms in phases.items() if terms},
        peak_gib=peaks,
        host_gib=host_memory(search.demands[role], choice, search.workload),
        sequences=None if choice.concurrency is None else floor(choice.concurrency),
    )


def _sync(search: Search, candidate: Candidate, role: str) -> Mapping[str, Terms]:
    """Return the memory terms of a followed role while it syncs weights, for the sync that needs most."""
    phases: list[Terms] = []
    for sync in search.workload.copies:
        if sync.source == role:
            source, target = ((search.demands[of], candidate.choices[of]) for of in (sync.source, sync.target))
            same = candidate.pool_of[sync.source] == candidate.pool_of[sync.target]
            phases.append(sync_memory(*source, *target, search.host_set([role]).sharp, same_gpus=same))
    return {"sync": max(phases, key=lambda terms: sum(terms.values()))} if phases else {}


def _headroom(search: Search, memory: Mapping[str, RoleMemory]) -> tuple[float | None, str]:
    sizes = {host.name: search.cluster.memory_gib(host) for host in search.cluster.hosts}
    left = [
        (size - gib, f"{host} gpu {gpu}, {of.phase}")
        for of in memory.values()
        for host, gpus in of.peak_gib.items()
        for gpu, gib in gpus.items()
        if (size := sizes[host]) is not None
    ]
    return min(left, key=lambda each: each[0], default=(None, ""))


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


def _limits(search: Search, candidate: Candidate) -> tuple[str, ...]:
    """Return for every role the response length at which its layout no longer fits, the shortest first."""
    found = []
    for role, choice in candidate.choices.items():
        tasks = search.workload.of(role)
        prompt = min((int(task.prompts.longest) for task in tasks), default=0)
        tokens = _most_tokens(search, candidate, role, choice, tasks)
        model = search.demands[role].architecture
        if tokens is not None and model is not None and tokens < model.max_position_embeddings:
            what = "no KV cache room for one sequence" if choice.phase == "generate" else "out of memory"
            found.append((tokens - prompt, f"{what} in {choice.phase} ({role})"))
    return tuple(f"responses longer than {tokens} tokens: {what}" for tokens, what in sorted(found))


def _most_tokens(
    search: Search, candidate: Candidate, role: str, choice: RoleChoice, tasks: Sequence[Task]
) -> int | None:
    demand = search.demands[role]
    model, memory = demand.architecture, search.host_set([role]).memory_gib
    if model is None or memory is None or not tasks:
        return None
    if choice.kv_tokens is not None:
        return ceil(choice.kv_tokens)
    others = candidate.uses[candidate.pool_of[role]].choices
    beside = sum(sum(other.idle.values()) for name, other in others.items() if name != role)
    host_set = search.host_set([role])
    available = host_set.usable_gib - beside

    def terms(tokens: float) -> Terms:
        if demand.trains:
            return update_terms(model, choice.layout, demand.training, tokens, sharp=host_set.sharp)
        return score_terms(
            model,
            choice.layout,
            tokens,
            weight_bytes=demand.weight_bytes,
            training=demand.training,
            sharp=host_set.sharp,
        )

    longest = max((task.longest for task in tasks if task.is_expected), default=choice.layout.micro_batch_tokens)
    found = largest_micro_batch(terms, longest, 64 * longest, available)
    return found // max(task.unit_size for task in tasks) if found < 64 * longest else None


def _alternatives(search: Search, result: SearchResult, step: float) -> tuple[Alternative, ...]:
    """Return the best of every other way to share, fastest first; then the ways that do not fit."""
    chosen = result.candidate
    best: dict[Partition, Candidate] = {}
    for other in result.alternatives:
        if other.partition != chosen.partition or other.used_gpus < chosen.used_gpus:
            best.setdefault(other.partition, other)
    times = {way: step_seconds(other, search.uses) for way, other in best.items()}
    alternatives = []
    for way, other in sorted(best.items(), key=lambda each: (each[1].margin, times[each[0]])):
        slower = times[way] / step - 1 if step else 0.0
        idle = max(other.schedule.idle_share(index) for index in range(len(way)))
        cost = "equally fast" if other.used_gpus == chosen.used_gpus else f"uses {other.used_gpus} GPUs"
        loses = f"{slower:.0%} slower" if slower >= 0.005 else cost
        loses += f", idle {idle:.0%}" if len(way) > 1 else ""
        loses += ", tight" if other.margin > chosen.margin else ""
        what = describe_pools(way, other.gpus)
        alternatives.append(Alternative(what=what, step_seconds=times[way], loses=loses))
    for rejected in _nearest(result.rejected):
        if rejected.partition not in {*best, chosen.partition}:
            what = describe_pools(rejected.partition, rejected.gpus)
            alternatives.append(Alternative(what=what, step_seconds=None, loses=str(rejected.shortage)))
    return tuple(alternatives)


def _nearest(rejected: Sequence[RejectedCandidate]) -> list[RejectedCandidate]:
    """Return, for every way to share, the rejected candidate with the smallest shortage."""
    nearest: dict[object, RejectedCandidate] = {}
    for one in rejected:
        if one.partition not in nearest or one.shortage.gib < nearest[one.partition].shortage.gib:
            nearest[one.partition] = one
    return list(nearest.values())
