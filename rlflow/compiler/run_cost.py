"""The time and the price of a whole run."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from rlflow.recipe import Recipe
from rlflow.resources.cluster import Cluster
from rlflow.resources.layout import RolePlacement
from rlflow.resources.planner.prediction.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """The predicted cost of all steps, evaluations and checkpoints, without the start of engines."""

    hours: float
    hours_range: tuple[float, float]
    """The range in which the time is, as for a step."""
    gpu_hours: float
    """Hours of the GPUs in use."""
    price: float | None
    """The price of all GPUs of the hosts in use, since hosts are rented whole; None if a kind of GPU has no price."""


def run_cost(
    recipe: Recipe, prediction: Prediction, cluster: Cluster, placements: Mapping[str, RolePlacement]
) -> RunCost:
    """Return the cost of a run of the recipe."""
    # The first evaluation is before training, and the last one and the last checkpoint are after the last step.
    evaluations = 0 if recipe.evaluation is None else 1 + ceil(recipe.steps / recipe.evaluation.every)
    checkpoints = ceil(recipe.steps / recipe.checkpoints.every)
    pauses = evaluations * prediction.evaluation_seconds + checkpoints * prediction.checkpoint_seconds
    hours, low, high = (
        (recipe.steps * step + pauses) / 3600 for step in (prediction.step_seconds, *prediction.step_seconds_range)
    )
    used = {bundle.host for placement in placements.values() for bundle in placement.bundles}
    prices = [(host.gpus, cluster.gpus[host.gpu].price_per_hour) for host in cluster.hosts if host.name in used]
    price = None
    if all(price_per_hour is not None for _, price_per_hour in prices):
        price = hours * sum(gpus * (price_per_hour or 0.0) for gpus, price_per_hour in prices)
    return RunCost(hours=hours, hours_range=(low, high), gpu_hours=hours * prediction.num_gpus, price=price)
