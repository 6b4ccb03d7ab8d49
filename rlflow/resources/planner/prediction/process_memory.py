"""The predicted memory of each process of a run, in each phase of its work, and of each host."""

from collections.abc import Mapping
from math import ceil

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout, RolePlacement
from rlflow.resources.memory.processes import LOCAL_PROCESS, Phase, RoleOnCpu, process_phases
from rlflow.resources.memory.state import Terms
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.prediction.task_times import DEFAULT_NUM_SEQS
from rlflow.resources.time.speed import Speed
from rlflow.resources.workload import Task, Workload

# Memory of a process on a GPU that torch's allocator does not count.
_OUTSIDE_TORCH = ("context", "nccl", "graphs")
# vLLM's blocks of the KV cache on a CPU, in tokens (engines/serving/settings.py).
_BLOCK_TOKENS = 32


def predict_processes(
    inputs: PlannerInputs, roles: Mapping[str, RolePlacement], phases: Mapping[str, Mapping[str, Terms]]
) -> Mapping[str, Mapping[str, Terms]]:
    """Return the memory of each process, by phase and purpose. ``phases`` has what each role holds on its GPUs."""
    host_set = inputs.host_set([next(iter(roles))])
    if host_set.memory_gib is not None:
        return _on_gpus(roles, phases)
    return _on_cpus(inputs.demands, inputs.workload, roles, host_set.speed)


def memory_of_hosts(roles: Mapping[str, RolePlacement], host_gib: Mapping[str, Terms]) -> Mapping[str, float]:
    """Return the GiB of each host for offloaded roles and data. ``host_gib`` is that of each GPU of a role."""
    hosts: dict[str, float] = {}
    for role, placement in roles.items():
        gib = sum(host_gib[role].values())
        for bundle in placement.bundles if gib else ():
            hosts[bundle.host] = hosts.get(bundle.host, 0.0) + gib
    return hosts


def _on_gpus(
    roles: Mapping[str, RolePlacement], phases: Mapping[str, Mapping[str, Terms]]
) -> dict[str, dict[str, Terms]]:
    """Return what torch reserves in each worker, from the ``phases`` of each role."""
    return {
        f"{role}/{rank}": {
            phase: {term: gib for term, gib in terms.items() if term.split()[-1] not in _OUTSIDE_TORCH}
            for phase, terms in phases[role].items()
            if phase != "resting"
        }
        for role, placement in roles.items()
        for rank in range(len(placement.workers))
    }


def _on_cpus(
    demands: Mapping[str, Demand], workload: Workload, roles: Mapping[str, RolePlacement], speed: Speed
) -> dict[str, Mapping[str, Terms]]:
    """Return what is resident in each process. Roles on one CPU share a process unless an engine needs its own."""
    on_cpu = {role: _role_on_cpu(demands[role], workload, placement) for role, placement in roles.items()}
    known = {role: of_role for role, of_role in on_cpu.items() if of_role is not None}
    baselines = {role: speed.of_engine(demands[role].engine).efficiency.process_gib for role in roles}
    bundles = {bundle for placement in roles.values() for bundle in placement.bundles}
    if len(bundles) == 1 and not any(demand.own_process for demand in demands.values()):
        return {LOCAL_PROCESS: process_phases(list(known.values()), max(baselines.values()), sends=False)}
    return {
        f"{role}/{rank}": process_phases([of_role], baselines[role], sends=True)
        for role, of_role in known.items()
        for rank in range(len(roles[role].workers))
    }


def _pass_tokens(task: Task, layout: Layout) -> float:
    """Return the tokens that a micro-batch computes: those of a prompt once for its samples."""
    of_rank = task.tokens * task.epochs / task.minibatches / layout.data_parallel_size
    return task.computed_share * min(of_rank, layout.micro_batch_tokens)


def _role_on_cpu(demand: Demand, workload: Workload, placement: RolePlacement) -> RoleOnCpu | None:
    """Return the work of one process of a role; None for a model without figures."""
    if demand.architecture is None:
        return None
    tasks, layout = workload.of(demand.role), placement.layout
    phases: set[Phase] = {task.kind for task in tasks if task.kind != "host"}
    if any(demand.role == sync.target for sync in workload.weight_syncs):
        phases.add("sync")
    workers = layout.data_parallel_size
    passes = [task for task in tasks if task.kind in ("score", "update")]
    tokens = max((_pass_tokens(task, layout) for task in passes), default=0.0)
    samples = max((task.samples / workers for task in tasks if task.kind == "generate"), default=0.0)
    longest = max((task.longest for task in tasks), default=0)
    serves = demand.job == "serve" and "tensor" in demand.parallel
    if serves:
        longest = _BLOCK_TOKENS * (ceil(longest / _BLOCK_TOKENS) + 1)
    return RoleOnCpu(
        model=demand.architecture,
        layout=layout,
        training=demand.training,
        trains=demand.job == "train",
        weight_bytes=demand.weight_bytes,
        phases=frozenset(phases),
        tokens=tokens,
        # A serving engine reserves its KV cache when it starts.
        sequences=DEFAULT_NUM_SEQS + 1 if serves else min(samples, DEFAULT_NUM_SEQS),
        longest=longest,
        serves=serves,
    )
