"""The risks of a plan: memory within the error of its prediction, and host memory that the cluster does not state."""

from collections.abc import Iterator, Mapping

from rlflow.resources.memory.state import total_gib
from rlflow.resources.planner.candidate import SearchResult
from rlflow.resources.planner.confidence import Band, Margin
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.prediction.role_memory import memory_band, sync_needs


def plan_risks(inputs: PlannerInputs, result: SearchResult, host_gib: Mapping[str, float]) -> tuple[str, ...]:
    """Return one line for each reason why the plan may fail; none where all predictions may be wrong by their band."""
    return (*gpu_risks(inputs, result), *_host_risks(inputs, host_gib))


def gpu_risks(inputs: PlannerInputs, result: SearchResult) -> Iterator[str]:
    """Yield one line for each role that may need more than the memory of a GPU."""
    candidate = result.candidate
    for roles, use in zip(candidate.partition, candidate.uses, strict=True):
        host_set = inputs.host_set(roles)
        demands = {role: inputs.demands[role] for role in roles}
        for role, choice in use.choices.items():
            if choice.margin is Margin.SAFE:
                continue
            beside = use.idle_gib_beside(role)
            band = memory_band(demands[role], choice.layout)
            if choice.phase == "generate":
                yield f"{role}: idle roles hold {_range(beside, band)} of the {host_set.usable_gib:.0f} GiB of its GPUs"
            else:
                needed = _range(total_gib(choice.awake) + beside, band)
                yield f"{role} needs {needed} of {host_set.usable_gib:.0f} GiB in {choice.phase}"
        for sync, gib in sync_needs(demands, use.choices, inputs.workload, host_set.sharp):
            band = memory_band(demands[sync.source], use.choices[sync.source].layout)
            if gib * band.factor(Margin.SAFE) > host_set.usable_gib:
                needed = _range(gib, band)
                yield f"{sync.source} needs {needed} of {host_set.usable_gib:.0f} GiB while weights go to {sync.target}"


def _range(gib: float, band: Band) -> str:
    return f"{gib:.0f} GiB ({gib * band.low:.0f} to {gib * band.high:.0f} within the error)"


def _host_risks(inputs: PlannerInputs, host_gib: Mapping[str, float]) -> Iterator[str]:
    for host in inputs.cluster.hosts:
        gpu_gib = inputs.cluster.memory_gib(host)
        needed = host_gib.get(host.name, 0.0)
        if gpu_gib is not None and host.memory_gib is None and needed > gpu_gib * len(host.usable):
            yield f"needs {needed:.0f} GiB of host memory on {host.name}; the cluster does not state it (memory_gib)"
