"""How much of the hosts' object stores batches may take, and whether that is enough for a plan."""

from collections.abc import Mapping

from rlflow.compiler.plan import Plan
from rlflow.errors import PlacementError
from rlflow.nodes.generate import Generate
from rlflow.resources.layout import GIB
from rlflow.runtime.cluster.hosts import quiet_ray
from rlflow.runtime.data_plane.budget import StoreLimit

# Of a host's store. The rest is for what is cut out for readers on other hosts, for what its own readers fetch from
# there, of which Ray drops what nobody reads, for what it frees a second late, and for weights on their way.
_SHARE = 0.5
# Of a token of a rollout: its id, its logprob and its text.
_TOKEN_BYTES = 12


def store_limits() -> Mapping[str, StoreLimit]:
    """By the id of the Ray node."""
    return {
        node["NodeID"]: StoreLimit(node["NodeName"], int(_SHARE * node["Resources"].get("object_store_memory", 0)))
        for node in quiet_ray().nodes()
        if node["Alive"]
    }


def check_limits(plan: Plan, limits: Mapping[str, StoreLimit]) -> None:
    """``limits`` by the names of the plan's hosts. Raises PlacementError for a step, or a single sample, that does not
    fit."""
    fix = "give Ray more with --object-store-memory, or make {} smaller"
    least = min(limits.values(), key=lambda limit: limit.nbytes)
    for node in plan.graph.nodes:
        if isinstance(node.operation, Generate):
            longest = node.operation.max_tokens * _TOKEN_BYTES
            if longest > least.nbytes:
                raise PlacementError(
                    f"graph.{node.name}.max_tokens",
                    f"a response of {node.operation.max_tokens} tokens is {longest / GIB:.2f} GiB, and batches may take"
                    f" {least.nbytes / GIB:.2f} GiB of the object store of {least.name}",
                    fix=fix.format("max_tokens"),
                )
    for host, gib in plan.prediction.data.store_peak_gib.items():
        if host in limits and gib * GIB > limits[host].nbytes:
            raise PlacementError(
                "data.batch_size",
                f"{gib:.2f} GiB of a step's data are expected in the object store of {host} at once, and batches may"
                f" take {limits[host].nbytes / GIB:.2f} GiB of it",
                fix=fix.format("batch_size, group_size or max_tokens"),
            )
