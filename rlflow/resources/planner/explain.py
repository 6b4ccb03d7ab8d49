"""Explanations of a search: warnings about a plan that fits, or the error for roles that do not fit.

The error names a smallest set of pinned values that conflict, and the nearest change that would fit.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from rlflow.errors import PlacementError
from rlflow.resources.cluster import MOST_GPUS, Cluster
from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout, Resources
from rlflow.resources.planner.search import Search, SearchResult
from rlflow.resources.workload import Workload

_OPEN = Resources()
# The most additional hosts that are tried.
_MORE_HOSTS = 16
# A pool that is idle for a larger share of the step gets a warning.
_MUCH_IDLE = 0.7


@dataclass(frozen=True)
class _Pin:
    """A value that the recipe pins."""

    role: str
    field: str
    value: object

    def __str__(self) -> str:
        return _override(self.role, self.field, self.value)


def _override(role: str, field: str, value: object) -> str:
    text = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else "null" if value is None else str(value)
    return f"roles.{role}.{field}={text}"


def placement_error(search: Search) -> PlacementError:
    """Return the error for a search that found nothing, by searching again with one constraint less at a time."""
    nearest = min((rejected.shortage for rejected in search.rejected), key=lambda s: s.gib, default=None)
    demands = list(search.demands.values())
    pins = [
        _Pin(demand.role, field.name, getattr(demand.pins, field.name))
        for demand in demands
        for field in fields(Resources)
        if getattr(demand.pins, field.name) != getattr(_OPEN, field.name)
    ]
    conflict = _conflicting_pins(search, demands, pins)
    fixes = list(_relaxed(search, demands, conflict))
    if not fixes:
        fixes = [*_smaller_work(search, demands), *_more_hosts(search, demands)]
    role = conflict[0].role if conflict else nearest.role if nearest else demands[0].role
    total = sum(len(host.usable) for host in search.cluster.hosts)
    reason = f" ({nearest})" if nearest is not None else ""
    shape = search.cluster.shape
    if len(conflict) > 1:
        fact = f"{' and '.join(map(str, conflict))} conflict on {shape}{reason}"
    elif conflict:
        fact = f"{conflict[0]} does not fit {shape}{reason}"
    else:
        fact = f"nothing fits {shape}{reason}"
    return PlacementError(
        f"roles.{role}" + (f".{conflict[0].field}" if conflict else ""),
        fact,
        free=f"{total} GPU{'s' if total > 1 else ''}",
        fix=", or ".join(fixes) or "a smaller model, larger GPUs, or hosts with more memory",
    )


def _fits(
    search: Search, demands: Sequence[Demand], workload: Workload | None = None, cluster: Cluster | None = None
) -> bool:
    return Search(demands, workload or search.workload, cluster or search.cluster, search.calibration).fits()


def _without(demands: Sequence[Demand], pins: Sequence[_Pin]) -> list[Demand]:
    relaxed = []
    for demand in demands:
        opened = {pin.field: getattr(_OPEN, pin.field) for pin in pins if pin.role == demand.role}
        wants = Resources(**{f.name: getattr(demand.pins, f.name) for f in fields(Resources)} | opened)
        relaxed.append(replace(demand, pins=wants))
    return relaxed


def _conflicting_pins(search: Search, demands: Sequence[Demand], pins: Sequence[_Pin]) -> list[_Pin]:
    """Return a smallest set of pins that conflict; empty where the roles do not fit without any pin either."""
    if not pins or not _fits(search, _without(demands, pins)):
        return []
    conflict = list(pins)
    for pin in pins:
        fewer = [other for other in conflict if other != pin]
        if not _fits(search, _without(demands, [other for other in pins if other not in fewer])):
            conflict = fewer
    return conflict


def _relaxed(search: Search, demands: Sequence[Demand], conflict: Sequence[_Pin]) -> Iterator[str]:
    """Yield the value that the planner would choose for each pin, or all pins open where one is not enough."""
    single = False
    for pin in conflict:
        without = Search(_without(demands, [pin]), search.workload, search.cluster, search.calibration)
        best = without.best() if without.fits() else None
        if best is None:
            continue
        single = True
        chosen = best.candidate
        value: object = "auto"
        if pin.field == "gpus":
            value = chosen.gpus[chosen.pool_of[pin.role]]
        elif hasattr(chosen.choices[pin.role].layout, pin.field):
            value = getattr(chosen.choices[pin.role].layout, pin.field)
        elif pin.field == "label":
            value = None
        yield _override(pin.role, pin.field, "auto" if value == pin.value else value)
    if len(conflict) > 1 and not single and _fits(search, _without(demands, conflict)):
        yield " ".join(_override(pin.role, pin.field, getattr(_OPEN, pin.field)) for pin in conflict)


def _smaller_work(search: Search, demands: Sequence[Demand]) -> Iterator[str]:
    """Yield the longest responses that would fit, found by bisection."""
    longest = max(task.longest for task in search.workload.tasks)
    unit_size = max(task.unit_size for task in search.workload.tasks)
    prompt = max(int(task.prompts.longest) for task in search.workload.tasks)
    least = unit_size * (prompt + 1)
    if not _fits(search, demands, _shortened(search.workload, least)):
        return
    low, high = least, longest
    while high - low > max(16, longest // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(search, demands, _shortened(search.workload, middle)) else (low, middle)
    yield f"responses of at most {low // unit_size - prompt} tokens"


def _shortened(workload: Workload, longest: int) -> Workload:
    return replace(workload, tasks=tuple(replace(t, longest=min(t.longest, longest)) for t in workload.tasks))


def _more_hosts(search: Search, demands: Sequence[Demand]) -> Iterator[str]:
    """Yield the smallest number of additional hosts, equal to the largest host, that would be enough."""
    cluster = search.cluster
    like = max(search.host_set([demands[0].role]).hosts, key=lambda host: host.gpus)

    def would_fit(count: int) -> bool:
        extra = tuple(replace(like, name=f"{like.name}-more-{n}", free=None) for n in range(count))
        return _fits(search, demands, cluster=replace(cluster, hosts=(*cluster.hosts, *extra)))

    most = max(1, min(_MORE_HOSTS, MOST_GPUS // 64 // like.gpus))
    if not would_fit(most):
        return
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if would_fit(middle) else (middle, high)
    yield f"{high} more host{'s' if high > 1 else ''} of {like.gpus} {like.gpu}"


def plan_warnings(search: Search, result: SearchResult) -> tuple[str, ...]:
    """Return one line for each warning about the plan."""
    lines: list[str] = []
    for role in result.candidate.choices:
        lines += _role_warnings(search, result, role)
    for index in range(len(result.candidate.partition)):
        lines += _pool_warnings(search, result, index)
    return (*dict.fromkeys(lines), *_cluster_warnings(search, result))


def _role_warnings(search: Search, result: SearchResult, role: str) -> Iterator[str]:
    choice, workers = result.candidate.choices[role], result.roles[role].workers
    copies = choice.layout.data_parallel_size
    if any(len({bundle.host for bundle in worker.bundles}) > 1 for worker in workers):
        yield f"{role}: the pipeline stages of one engine are on several hosts"
    for task in search.workload.of(role):
        if task.kind != "generate" and task.samples % copies:
            yield f"{role}: {task.samples} samples are not a multiple of {copies} workers, so shares are uneven"
        room = choice.concurrency
        if task.kind == "generate" and room is not None and task.samples / copies - room >= 1:
            share = f"{room * copies / task.samples:.0%}"
            yield f"{role}: the KV cache has room for {share} of the batch at once; other sequences wait"


def _pool_warnings(search: Search, result: SearchResult, index: int) -> Iterator[str]:
    candidate = result.candidate
    roles = candidate.partition[index]
    idle = candidate.schedule.idle_share(index)
    if idle > _MUCH_IDLE:
        yield f"the GPUs of {', '.join(roles)} are idle for {idle:.0%} of the step"
    bundles = {bundle for role in roles for bundle in result.roles[role].bundles}
    kinds = sorted({host.gpu for host in search.cluster.hosts if host.name in {bundle.host for bundle in bundles}})
    if len(kinds) > 1:
        yield f"{', '.join(roles)} on {' and '.join(kinds)}: all run at the speed of the slowest"
    for role in roles:
        unused = candidate.gpus[index] - candidate.choices[role].layout.num_gpus
        if unused and "data" in search.demands[role].parallel:
            pool = Counter(bundle.host for bundle in bundles)
            if candidate.gpus[index] == sum(len(host.usable) for host in search.cluster.hosts):
                pool = Counter({host.name: len(host.usable) for host in search.cluster.hosts})
            reason = _idle_reason(search, candidate.choices[role].layout, pool, unused)
            yield f"{role} leaves {_gpus(unused)} idle: {reason}"


def _idle_reason(search: Search, layout: Layout, pool: Counter[str], unused: int) -> str:
    """Explain why a role cannot use all GPUs of its pool, which has so many on each host."""
    degrees = {
        "tensor_parallel_size": layout.tensor_parallel_size,
        "sequence_parallel_size": layout.sequence_parallel_size,
    }
    words = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    group = layout.tensor_parallel_size * layout.sequence_parallel_size
    hosts = [host for host in search.cluster.hosts if pool[host.name] % group]
    if not hosts or sum(pool[host.name] % group for host in hosts) != unused:
        copy = layout.num_gpus // layout.data_parallel_size
        return f"its data_parallel_size {layout.data_parallel_size} needs {layout.num_gpus}, {copy} for each copy"
    first = hosts[0]
    count = pool[first.name]
    owner = f"{first.name} has" if count == len(first.usable) else f"its pool on {first.name} has"
    more = f" (and {len(hosts) - 1} more hosts)" if len(hosts) > 1 else ""
    return f"{owner} {_gpus(count)}, which is not a multiple of {words}{more}"


def _cluster_warnings(search: Search, result: SearchResult) -> Iterator[str]:
    hosts = [host for host in search.cluster.hosts if host.usable]
    for kind in sorted({host.gpu for host in hosts}):
        if "bfloat16" not in (search.cluster.gpus[kind].peak_tflops or {"bfloat16": 1}):
            yield f"{kind} does not compute in bfloat16: times are predicted for float16"
    used = {bundle for placement in result.roles.values() for bundle in placement.bundles}
    unused = sum(len(host.usable) for host in hosts) - len(used)
    if unused and all(search.cluster.memory_gib(host) is not None for host in hosts):
        yield f"{_gpus(unused)} of the cluster not used"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"
