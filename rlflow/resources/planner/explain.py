"""Why nothing fits: the smallest set of pinned values that clash, and the nearest change that would fit.

What an expert would say of a plan that fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from rlflow.errors import PlacementError
from rlflow.resources.cluster import MOST_GPUS, Cluster
from rlflow.resources.demand import Demand
from rlflow.resources.layout import Resources
from rlflow.resources.planner.search import Search, SearchResult
from rlflow.resources.workload import Workload

_OPEN = Resources()
# So many more hosts are tried at most.
_MORE_HOSTS = 16


@dataclass(frozen=True)
class _Pin:
    role: str
    field: str
    value: object

    def __str__(self) -> str:
        return _override(self.role, self.field, self.value)


def _override(role: str, field: str, value: object) -> str:
    text = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else "null" if value is None else str(value)
    return f"roles.{role}.{field}={text}"


def placement_error(search: Search) -> PlacementError:
    """For a search that has found nothing. Solves again with one constraint less at a time."""
    nearest = min((rejected.shortage for rejected in search.rejected), key=lambda s: s.gib, default=None)
    demands = list(search.demands.values())
    pins = [
        _Pin(demand.role, field.name, getattr(demand.pins, field.name))
        for demand in demands
        for field in fields(Resources)
        if getattr(demand.pins, field.name) != getattr(_OPEN, field.name)
    ]
    clash = _clash(search, demands, pins)
    fixes = list(_relaxed(search, demands, clash))
    if not fixes:
        fixes = [*_smaller_work(search, demands), *_more_hosts(search, demands)]
    role = clash[0].role if clash else nearest.role if nearest else demands[0].role
    total = sum(len(host.usable) for host in search.cluster.hosts)
    reason = f" ({nearest})" if nearest is not None else ""
    shape = search.cluster.shape
    if len(clash) > 1:
        fact = f"{' and '.join(map(str, clash))} do not go together on {shape}{reason}"
    elif clash:
        fact = f"{clash[0]} does not fit {shape}{reason}"
    else:
        fact = f"nothing fits {shape}{reason}"
    return PlacementError(
        f"roles.{role}" + (f".{clash[0].field}" if clash else ""),
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


def _clash(search: Search, demands: Sequence[Demand], pins: Sequence[_Pin]) -> list[_Pin]:
    """A set of pins that cannot stand together, none of which can be left out of it; empty when none is to blame."""
    if not pins or not _fits(search, _without(demands, pins)):
        return []
    clash = list(pins)
    for pin in pins:
        fewer = [other for other in clash if other != pin]
        if not _fits(search, _without(demands, [other for other in pins if other not in fewer])):
            clash = fewer
    return clash


def _relaxed(search: Search, demands: Sequence[Demand], clash: Sequence[_Pin]) -> Iterator[str]:
    """For each pin the value that the planner takes without it; all of them left open, where one is not enough."""
    single = False
    for pin in clash:
        placed = Search(_without(demands, [pin]), search.workload, search.cluster, search.calibration)
        best = placed.best() if placed.fits() else None
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
    if len(clash) > 1 and not single and _fits(search, _without(demands, clash)):
        yield " ".join(_override(pin.role, pin.field, getattr(_OPEN, pin.field)) for pin in clash)


def _smaller_work(search: Search, demands: Sequence[Demand]) -> Iterator[str]:
    """The longest responses that would fit, by halving the difference."""
    longest = max(task.longest for task in search.workload.tasks)
    together = max(task.unit_size for task in search.workload.tasks)
    prompt = max(int(task.prompts.longest) for task in search.workload.tasks)
    least = together * (prompt + 1)
    if not _fits(search, demands, _shortened(search.workload, least)):
        return
    low, high = least, longest
    while high - low > max(16, longest // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(search, demands, _shortened(search.workload, middle)) else (low, middle)
    yield f"responses of {low // together - prompt} tokens at most"


def _shortened(workload: Workload, longest: int) -> Workload:
    return replace(workload, tasks=tuple(replace(t, longest=min(t.longest, longest)) for t in workload.tasks))


def _more_hosts(search: Search, demands: Sequence[Demand]) -> Iterator[str]:
    """The fewest more hosts, like the largest, that would do."""
    cluster = search.cluster
    like = max(search.host_set([demands[0].role]).hosts, key=lambda host: host.gpus)

    def would_do(count: int) -> bool:
        extra = tuple(replace(like, name=f"{like.name}-more-{n}", free=None) for n in range(count))
        return _fits(search, demands, cluster=replace(cluster, hosts=(*cluster.hosts, *extra)))

    most = max(1, min(_MORE_HOSTS, MOST_GPUS // 64 // like.gpus))
    if not would_do(most):
        return
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if would_do(middle) else (middle, high)
    yield f"{high} more host{'s' if high > 1 else ''} of {like.gpus} {like.gpu}"


# A pool that is idle for a larger part of the step is worth a warning.
_MUCH_IDLE = 0.7


def plan_warnings(search: Search, placed: SearchResult) -> tuple[str, ...]:
    """One line each."""
    lines: list[str] = []
    for role in placed.candidate.choices:
        lines += _of_role(search, placed, role)
    for index in range(len(placed.candidate.partition)):
        lines += _of_pool(search, placed, index)
    return (*dict.fromkeys(lines), *_of_cluster(search, placed))


def _of_role(search: Search, placed: SearchResult, role: str) -> Iterator[str]:
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


def _of_pool(search: Search, placed: SearchResult, index: int) -> Iterator[str]:
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


def _of_cluster(search: Search, placed: SearchResult) -> Iterator[str]:
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
