"""The time and the price of a whole run."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.resources.cluster import Cluster
from rlflow.resources.layout import RolePlacement
from rlflow.resources.planner.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """The predicted cost of all steps, without evaluation, checkpoints and the start of engines."""

    hours: float
    hours_range: tuple[float, float]
    """The range in which the time is, as for a step."""
    gpu_hours: float
    """Hours of the GPUs in use."""
    price: float | None
    """The price of all GPUs of the hosts in use, since hosts are rented whole; None if a kind of GPU has no price."""


def run_cost(steps: int, prediction: Prediction, cluster: Cluster, placements: Mapping[str, RolePlacement]) -> RunCost:
    """Return the cost of a run with so many steps."""
    hours = steps * prediction.step_seconds / 3600
    low, high = (steps * seconds / 3600 for seconds in prediction.step_seconds_range)
    used = {bundle.host for placement in placements.values() for bundle in placement.bundles}
    prices = [(host.gpus, cluster.gpus[host.gpu].price_per_hour) for host in cluster.hosts if host.name in used]
    price = None
    if all(each is not None for _, each in prices):
        price = hours * sum(gpus * (each or 0.0) for gpus, each in prices)
    return RunCost(hours=hours, hours_range=(low, high), gpu_hours=hours * prediction.num_gpus, price=price)
