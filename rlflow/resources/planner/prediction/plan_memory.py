"""The memory of a plan: of each role on its GPUs, the fullest GPU, and how long responses may become."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor

from rlflow.resources.memory.state import Terms, total_gib
from rlflow.resources.planner.candidate import Candidate, SearchResult
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.prediction.role_memory import (
    host_memory,
    largest_micro_batch,
    sync_memory,
    working_terms,
)


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


def role_memory(inputs: PlannerInputs, result: SearchResult, role: str) -> RoleMemory:
    """Return the memory of a role on its GPUs and their hosts."""
    choice = result.candidate.choices[role]
    sync = _sync_terms(inputs, result.candidate, role)
    phases = {choice.phase: choice.awake, "resting": choice.idle, "sync": sync}
    peaks: dict[str, dict[int, float]] = {}
    on_gpu = {other: set(placement.bundles) for other, placement in result.roles.items() if other != role}
    for bundle in result.roles[role].bundles if choice.awake else ():
        idle_roles = (other for other, bundles in on_gpu.items() if bundle in bundles)
        beside = sum(total_gib(result.candidate.choices[other].idle) for other in idle_roles)
        # The sync terms include the engine's own.
        peak = max(total_gib(choice.awake) + beside, total_gib(sync))
        peaks.setdefault(bundle.host, {})[bundle.gpu] = peak
    return RoleMemory(
        phase=choice.phase,
        phases={phase: {term: gib for term, gib in terms.items() if gib} for phase, terms in phases.items() if terms},
        peak_gib=peaks,
        host_gib=host_memory(inputs.demands[role], choice, inputs.workload),
        sequences=None if choice.concurrency is None else floor(choice.concurrency),
    )


def _sync_terms(inputs: PlannerInputs, candidate: Candidate, role: str) -> Terms:
    """Return the memory terms of a followed role while it syncs weights, for the sync that needs most."""
    sharp, pool_of = inputs.host_set([role]).sharp, candidate.pool_of
    syncs = [
        sync_memory(
            sync, inputs.demands, candidate.choices, sharp, same_gpus=pool_of[sync.source] == pool_of[sync.target]
        )
        for sync in inputs.workload.weight_syncs
        if sync.source == role
    ]
    return max(syncs, key=total_gib, default={})


def find_headroom(inputs: PlannerInputs, memory: Mapping[str, RoleMemory]) -> tuple[float | None, str]:
    """Return the free memory of the fullest GPU, and which that is; None where memory is not modelled."""
    sizes = {host.name: inputs.cluster.memory_gib(host) for host in inputs.cluster.hosts}
    left = [
        (size - gib, f"{host} gpu {gpu}, {role.phase}")
        for role in memory.values()
        for host, gpus in role.peak_gib.items()
        for gpu, gib in gpus.items()
        if (size := sizes[host]) is not None
    ]
    return min(left, key=lambda entry: entry[0], default=(None, ""))


def length_limits(inputs: PlannerInputs, candidate: Candidate) -> tuple[str, ...]:
    """Return for every role the response length at which its layout no longer fits, the shortest first."""
    limits = []
    for role, choice in candidate.choices.items():
        model, tasks = inputs.demands[role].architecture, inputs.workload.of(role)
        tokens = _most_tokens(inputs, candidate, role)
        if tokens is not None and model is not None and tokens < model.max_position_embeddings:
            what = "no KV cache room for one sequence" if choice.phase == "generate" else "out of memory"
            prompt = min(int(task.prompts.longest) for task in tasks)
            limits.append((tokens - prompt, f"{what} in {choice.phase} ({role})"))
    return tuple(f"responses longer than {tokens} tokens: {what}" for tokens, what in sorted(limits))


def _most_tokens(inputs: PlannerInputs, candidate: Candidate, role: str) -> int | None:
    """Return the tokens of the longest sequence for which a role's layout has memory; None: no limit is known."""
    demand, choice, tasks = inputs.demands[role], candidate.choices[role], inputs.workload.of(role)
    host_set = inputs.host_set([role])
    if demand.architecture is None or host_set.memory_gib is None or not tasks:
        return None
    if choice.phase == "generate":
        return ceil(choice.kv_tokens)
    available = host_set.usable_gib - candidate.uses[candidate.pool_of[role]].idle_gib_beside(role)
    longest = max((task.longest for task in tasks if task.is_expected), default=choice.layout.micro_batch_tokens)
    tokens = largest_micro_batch(
        lambda tokens: total_gib(working_terms(demand, choice.layout, tokens, host_set.sharp)),
        longest,
        64 * longest,
        available,
    )
    return tokens // max(task.unit_size for task in tasks) if tokens < 64 * longest else None
