"""The risks of a plan: memory within the error of its prediction, and host memory that the cluster does not state."""

from collections.abc import Iterator, Mapping

from rlflow.resources.planner.confidence import Band, Margin
from rlflow.resources.planner.pool import memory_band
from rlflow.resources.planner.search.pool_search import sync_needs
from rlflow.resources.planner.search.search import Search, SearchResult


def plan_risks(search: Search, result: SearchResult, host_gib: Mapping[str, float]) -> tuple[str, ...]:
    """Return one line for each reason why the plan may fail; none where all predictions may be wrong by their band."""
    return (*gpu_risks(search, result), *_host_risks(search, host_gib))


def gpu_risks(search: Search, result: SearchResult) -> Iterator[str]:
    """Yield one line for each role that may need more than the memory of a GPU."""
    candidate = result.candidate
    for roles, use in zip(candidate.partition, candidate.uses, strict=True):
        host_set = search.host_set(roles)
        demands = {role: search.demands[role] for role in roles}
        for role, choice in use.choices.items():
            if choice.margin is Margin.SAFE:
                continue
            beside = sum(sum(other.idle.values()) for name, other in use.choices.items() if name != role)
            band = memory_band(demands[role], choice.layout)
            if choice.phase == "generate":
                yield f"{role}: idle roles hold {_range(beside, band)} of the {host_set.usable_gib:.0f} GiB of its GPUs"
            else:
                needed = _range(sum(choice.awake.values()) + beside, band)
                yield f"{role} needs {needed} of {host_set.usable_gib:.0f} GiB in {choice.phase}"
        for sync, gib in sync_needs(demands, use.choices, search.workload, host_set.sharp):
            band = memory_band(demands[sync.source], use.choices[sync.source].layout)
            if gib * band.factor(Margin.SAFE) > host_set.usable_gib:
                needed = _range(gib, band)
                yield f"{sync.source} needs {needed} of {host_set.usable_gib:.0f} GiB while weights go to {sync.target}"


def _range(gib: float, band: Band) -> str:
    return f"{gib:.0f} GiB ({gib * band.low:.0f} to {gib * band.high:.0f} within the error)"


def _host_risks(search: Search, host_gib: Mapping[str, float]) -> Iterator[str]:
    for host in search.cluster.hosts:
        gpu_gib = search.cluster.memory_gib(host)
        needed = host_gib.get(host.name, 0.0)
        if gpu_gib is not None and host.memory_gib is None and needed > gpu_gib * len(host.usable):
            yield f"needs {needed:.0f} GiB of host memory on {host.name}; the cluster does not state it (memory_gib)"
