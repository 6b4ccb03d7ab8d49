"""Warnings about a plan: what keeps GPUs idle, what waits, and what crosses hosts."""

from collections import Counter
from collections.abc import Iterator, Mapping

from rlflow.resources.layout import Layout
from rlflow.resources.planner.candidate import SearchResult
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.prediction.node_times import NodeTime

# A pool that is idle for a larger share of the step gets a warning.
_MUCH_IDLE = 0.7


def plan_warnings(inputs: PlannerInputs, result: SearchResult, nodes: Mapping[str, NodeTime]) -> tuple[str, ...]:
    """Return one line for each warning about the plan."""
    lines: list[str] = []
    for role in result.candidate.choices:
        lines += _role_warnings(inputs, result, role)
    for index in range(len(result.candidate.partition)):
        lines += _pool_warnings(inputs, result, index)
    return (*dict.fromkeys(lines), *_cpu_warnings(inputs, nodes), *_cluster_warnings(inputs, result))


def _cpu_warnings(inputs: PlannerInputs, nodes: Mapping[str, NodeTime]) -> Iterator[str]:
    cpus = {host.name: host.cpus for host in inputs.cluster.hosts}
    for node, time in nodes.items():
        for host, cores in (time.cpu_cores or {}).items():
            if (there := cpus[host]) is not None and cores > there:
                yield f"{node}: agents need {cores:.0f} CPU cores on {host}, which has {there}; steps take longer"


def _role_warnings(inputs: PlannerInputs, result: SearchResult, role: str) -> Iterator[str]:
    choice = result.candidate.choices[role]
    copies = choice.layout.data_parallel_size
    for task in inputs.workload.of(role):
        if task.kind != "generate" and task.samples % copies:
            yield f"{role}: {task.samples} samples are not a multiple of {copies} workers, so shares are uneven"
        room = choice.concurrency
        if task.kind == "generate" and room is not None and task.samples / copies - room >= 1:
            share = f"{room * copies / task.samples:.0%}"
            yield f"{role}: the KV cache has room for {share} of the batch at once; other sequences wait"


def _pool_warnings(inputs: PlannerInputs, result: SearchResult, index: int) -> Iterator[str]:
    candidate = result.candidate
    roles = candidate.partition[index]
    idle = candidate.schedule.idle_share(index)
    if idle > _MUCH_IDLE:
        yield f"{', '.join(roles)}: idle for {idle:.0%} of the step"
    bundles = {bundle for role in roles for bundle in result.roles[role].bundles}
    on_hosts = Counter(bundle.host for bundle in bundles)
    kinds = sorted({host.gpu for host in inputs.cluster.hosts if host.name in on_hosts})
    if len(kinds) > 1:
        yield f"{', '.join(roles)} on {' and '.join(kinds)}: all run at the speed of the slowest"
    for role in roles:
        unused = candidate.gpus[index] - candidate.choices[role].layout.num_gpus
        if unused and "data" in inputs.demands[role].parallel:
            pool = on_hosts
            if candidate.gpus[index] == sum(len(host.usable) for host in inputs.cluster.hosts):
                pool = Counter({host.name: len(host.usable) for host in inputs.cluster.hosts})
            reason = _idle_reason(inputs, candidate.choices[role].layout, pool, unused)
            yield f"{role} leaves {_gpus(unused)} idle: {reason}"


def _idle_reason(inputs: PlannerInputs, layout: Layout, pool: Counter[str], unused: int) -> str:
    """Explain why a role cannot use all GPUs of its pool, which has so many on each host."""
    degrees = {
        "tensor_parallel_size": layout.tensor_parallel_size,
        "sequence_parallel_size": layout.sequence_parallel_size,
    }
    words = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    group = layout.tensor_parallel_size * layout.sequence_parallel_size
    hosts = [host for host in inputs.cluster.hosts if pool[host.name] % group]
    if not hosts or sum(pool[host.name] % group for host in hosts) != unused:
        copy = layout.num_gpus // layout.data_parallel_size
        return f"its data_parallel_size {layout.data_parallel_size} needs {layout.num_gpus}, {copy} for each copy"
    first = hosts[0]
    count = pool[first.name]
    owner = f"{first.name} has" if count == len(first.usable) else f"its pool on {first.name} has"
    more = f" (and {len(hosts) - 1} more hosts)" if len(hosts) > 1 else ""
    return f"{owner} {_gpus(count)}, which is not a multiple of {words}{more}"


def _cluster_warnings(inputs: PlannerInputs, result: SearchResult) -> Iterator[str]:
    hosts = [host for host in inputs.cluster.hosts if host.usable]
    for kind in sorted({host.gpu for host in hosts}):
        if condition := inputs.cluster.gpus[kind].condition:
            yield f"{kind}: {condition}"
    used = {bundle for placement in result.roles.values() for bundle in placement.bundles}
    unused = sum(len(host.usable) for host in hosts) - len(used)
    if unused and all(inputs.cluster.memory_gib(host) is not None for host in hosts):
        yield f"{_gpus(unused)} of the cluster not used"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"
