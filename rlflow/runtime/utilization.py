"""The operations of updates, counted from the lengths of their sequences, as a share of the GPUs' peak."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from rlflow.batch import Metrics, Minibatch
from rlflow.compiler.models import role_architecture
from rlflow.compiler.plan import Plan
from rlflow.engines.base import TokenLoss
from rlflow.engines.causal_lm.micro_batches import prompt_numbers
from rlflow.resources.models.lora import spares_gradients
from rlflow.resources.time.work import training_passes
from rlflow.runtime.objects.sharding import Cost, cost_of, row_costs
from rlflow.runtime.objects.store_usage import current_edge


class UpdateWork:
    """A counter of the operations of updates, which are compared with what their GPUs do at the peak (MFU).

    They are those of forward and backward pass, without recomputation. Updates on CPUs are not counted, and neither are
    those of models without figures.
    """

    def __init__(self, plan: Plan, engines: Mapping[str, Any]) -> None:
        """Count each update of the engines from now on."""
        self._least_seconds: defaultdict[str, float] = defaultdict(float)
        """The seconds that the updates of each node would take at the peak."""
        for role in plan.graph.trained_roles():
            model = role_architecture(plan.recipe, plan.graph, role)
            peak = plan.cluster.peak_flops({bundle.host for bundle in plan.roles[role].bundles})
            if model is not None and peak is not None:
                passes = training_passes(adapters=spares_gradients(plan.recipe.roles[role].lora))
                # The seconds at the peak for an operation of the forward pass, with its part of the backward pass.
                seconds = passes / (plan.roles[role].layout.num_gpus * peak)
                engines[role].update = self._counted(engines[role].update, cost_of(model), seconds)

    def take_utilization(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the MFU of each node that has trained since the last call, from the seconds that nodes took."""
        least_seconds = dict(self._least_seconds)
        self._least_seconds.clear()
        return {f"{node}/mfu": least / seconds[node] for node, least in least_seconds.items() if node in seconds}

    def _counted(self, update: Callable[..., Metrics], cost: Cost, seconds: float) -> Callable[..., Metrics]:
        @wraps(update)
        def call(minibatch: Minibatch, loss: TokenLoss) -> Metrics:
            operations = row_costs(minibatch, prompt_numbers(minibatch), cost).sum()
            self._least_seconds[current_edge()] += seconds * float(operations)
            return update(minibatch, loss)

        return call
