"""Why nothing fits: the smallest set of pinned values that clash, and the nearest change that would fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster, Host
from rlflow.resources.demand import Demand
from rlflow.resources.layout import Resources
from rlflow.resources.search.planner import Search
from rlflow.resources.workload import Workload

_OPEN = Resources()
# More of the same hosts are tried up to so many times as many.
_MORE_HOSTS = 16


@dataclass(frozen=True)
class _Pin:
    role: str
    field: str
    value: object

    def __str__(self) -> str:
        value = ",".join(self.value) if isinstance(self.value, tuple) else self.value
        return f"roles.{self.role}.{self.field}={value if value != '' else '[]'}"


def explain(search: Search) -> PlacementError:
    """For a search that has found nothing. Solves again with one constraint less at a time."""
    nearest = min((rejected.shortage for rejected in search.rejected), key=lambda s: s.gib, default=None)
    demands = list(search.demands.values())
    pins = [
        _Pin(demand.role, field.name, getattr(demand.wants, field.name))
        for demand in demands
        for field in fields(Resources)
        if getattr(demand.wants, field.name) != getattr(_OPEN, field.name)
    ]
    clash = _clash(search, demands, pins)
    fixes = [*_relaxed(search, demands, clash), *_smaller_work(search, demands), *_more_hosts(search, demands)]
    path = (
        f"roles.{clash[0].role}.{clash[0].field}" if clash else f"roles.{nearest.role if nearest else demands[0].role}"
    )
    total = sum(len(host.usable) for host in search.cluster.hosts)
    reason = f" ({nearest})" if nearest is not None else ""
    if len(clash) > 1:
        fact = f"{' and '.join(map(str, clash))} do not go together on {search.cluster.shape}{reason}"
    elif clash:
        fact = f"{clash[0].value} does not fit {search.cluster.shape}{reason}"
    else:
        fact = f"nothing fits {search.cluster.shape}{reason}"
    return PlacementError(
        path,
        fact,
        free=f"{total} GPU{'s' if total > 1 else ''}",
        fix="; or ".join(fixes) or "a smaller model, or larger GPUs",
    )


def _fits(
    search: Search, demands: Sequence[Demand], workload: Workload | None = None, cluster: Cluster | None = None
) -> bool:
    again = Search(demands, workload or search.workload, cluster or search.cluster, search.calibration)
    try:
        return again.best() is not None
    except PlacementError:
        return False


def _without(demands: Sequence[Demand], pins: Sequence[_Pin]) -> list[Demand]:
    relaxed = []
    for demand in demands:
        opened = {pin.field: getattr(_OPEN, pin.field) for pin in pins if pin.role == demand.role}
        wants = Resources(**{f.name: getattr(demand.wants, f.name) for f in fields(Resources)} | opened)
        relaxed.append(replace(demand, wants=wants))
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
    for pin in clash:
        again = Search(_without(demands, [pin]), search.workload, search.cluster, search.calibration)
        try:
            placed = again.best()
        except PlacementError:
            continue
        if placed is None:
            continue
        layout = placed.candidate.choices[pin.role].layout
        chosen = layout.num_gpus if pin.field == "gpus" else getattr(layout, pin.field, None)
        yield f"{pin.field} {chosen} for {pin.role}" if chosen is not None else f"no {pin.field} for {pin.role}"


def _smaller_work(search: Search, demands: Sequence[Demand]) -> Iterator[str]:
    """The longest responses that would fit, by halving the difference."""
    longest = max(task.longest for task in search.workload.tasks)
    low, high = 0, longest
    while high - low > max(16, longest // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(search, demands, _shortened(search.workload, middle)) else (low, middle)
    prompt = max(int(task.prompts.longest) for task in search.workload.tasks)
    if low > prompt:
        yield f"max_tokens {low - prompt}"


def _shortened(workload: Workload, longest: int) -> Workload:
    return replace(workload, tasks=tuple(replace(t, longest=min(t.longest, longest)) for t in workload.tasks))


def _more_hosts(search: Search, demands: Sequence[Demand]) -> Iterator[str]:
    """The fewest hosts like the first that would do."""
    cluster = search.cluster
    first = cluster.hosts[0]
    more = 1
    while more <= _MORE_HOSTS * len(cluster.hosts):
        extra = tuple(
            Host(name=f"{first.name}-more-{n}", gpus=first.gpus, gpu=first.gpu, labels=first.labels)
            for n in range(more)
        )
        if _fits(search, demands, cluster=replace(cluster, hosts=(*cluster.hosts, *extra))):
            yield f"{more} more host{'s' if more > 1 else ''} of {first.gpus} {first.gpu}"
            return
        more *= 2
