"""What an expert would say of a plan that fits."""

from collections.abc import Iterator

from rlflow.resources.search.planner import Placed, Search

# A pool that is idle for a larger part of the step is worth a warning.
_MUCH_IDLE = 0.7


def warnings_of(search: Search, placed: Placed) -> tuple[str, ...]:
    """One line each."""
    lines: list[str] = []
    for role in placed.candidate.choices:
        lines += _of_role(search, placed, role)
    for index in range(len(placed.candidate.partition)):
        lines += _of_pool(search, placed, index)
    return (*dict.fromkeys(lines), *_of_cluster(search, placed))


def _of_role(search: Search, placed: Placed, role: str) -> Iterator[str]:
    choice, workers = placed.candidate.choices[role], placed.roles[role].workers
    copies = choice.layout.data_parallel_size
    if any(len({bundle.host for bundle in worker.bundles}) > 1 for worker in workers):
        yield f"{role}: the stages of one engine lie on several hosts"
    for task in search.workload.of(role):
        if task.kind != "generate" and task.samples % copies:
            yield f"{role}: {task.samples} samples do not divide by {copies}: uneven shares"
        room = choice.concurrency
        if task.kind == "generate" and room is not None and task.samples / copies - room >= 1:
            share = f"{room * copies / task.samples:.0%}"
            yield f"{role}: keys and values have room for {share} of the batch at once; the rest waits its turn"


def _of_pool(search: Search, placed: Placed, index: int) -> Iterator[str]:
    candidate = placed.candidate
    roles = candidate.partition[index]
    idle = candidate.schedule.idle_share(index)
    if idle > _MUCH_IDLE:
        yield f"the GPUs of {', '.join(roles)} are idle for {idle:.0%} of the step"
    hosts = {bundle.host for role in roles for bundle in placed.roles[role].bundles}
    kinds = sorted({host.gpu for host in search.cluster.hosts if host.name in hosts})
    if len(kinds) > 1:
        yield f"{', '.join(roles)} on {' and '.join(kinds)}: all go at the pace of the slowest"
    for role in roles:
        without = candidate.gpus[index] - candidate.choices[role].layout.num_gpus
        if without and "data" in search.demands[role].parallel:
            yield f"{role}: {_gpus(without)} of its pool make no further group inside a host"


def _of_cluster(search: Search, placed: Placed) -> Iterator[str]:
    hosts = [host for host in search.cluster.hosts if host.usable]
    for kind in sorted({host.gpu for host in hosts}):
        if "bfloat16" not in (search.cluster.gpus[kind].peak_tflops or {"bfloat16": 1}):
            yield f"{kind} does not compute in bfloat16: times are those of float16"
    used = {bundle for placement in placed.roles.values() for bundle in placement.bundles}
    unused = sum(len(host.usable) for host in hosts) - len(used)
    if unused and all(search.cluster.memory_gib(host) is not None for host in hosts):
        yield f"{_gpus(unused)} not used"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"
