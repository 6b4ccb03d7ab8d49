"""The check that an engine samples with the logprobs of the engine that trains, where both have the same weights.

In float32 the two differ by about 1e-6. A large difference means that they do not compute the same model on the same
prompt. Nothing else shows it: the run continues, and learns less.
"""

from collections.abc import Mapping
from typing import Any

from rlflow.batch import Metrics, Rollouts
from rlflow.compiler.plan import Plan
from rlflow.errors import EngineError

MAX_DIFFERENCE = 1e-2
"""The largest mean difference between two engines' logprobs in float32, in nats."""
_CAUSES = "a weight sync that leaves weights out, or a model that one of the engines reads differently"
_CAUSES_WITH_IMAGES = (
    "images that one of the engines processes differently, or encodings of older weights that it keeps"
)


def check_sampler(plan: Plan, name: str, output: Metrics, edges: Mapping[str, Any], step: int) -> None:
    """Raise EngineError if the update ``name`` has a ``sampler_difference`` that the same weights cannot have.

    Tokens of other weights than those with which ``step`` began may differ, and so may all after a first update.
    """
    difference = output.values.get("sampler_difference", 0.0)
    if difference <= MAX_DIFFERENCE:
        return
    node = next(node for node in plan.graph.nodes if node.name == name)
    first = next(other for other in plan.graph.nodes if other.role == node.role and "Trains" in other.capabilities)
    rollouts = next(batch for origin in node.inputs.values() if isinstance(batch := edges[origin], Rollouts))
    model = plan.recipe.roles[str(node.role)].model
    is_exact = plan.recipe.models[model].dtype == "float32" and node is first
    if not is_exact or (rollouts.versions.run_values != step).any():
        return
    sampler = plan.graph.tokenizer_role()
    causes = _CAUSES if rollouts.images is None else f"{_CAUSES_WITH_IMAGES}; {_CAUSES}"
    raise EngineError(
        f"{name}/sampler_difference: expected at most {MAX_DIFFERENCE:g} in float32, got {difference:.3g}. The roles "
        f"{sampler} and {node.role} have the same weights (version {step} of models.{model}) and other logprobs of "
        f"the same tokens.\n"
        f"  Causes: {causes}.\n"
        f"  Fix: compare with roles.{sampler}.engine=transformers, which computes the model as {node.role} does."
    )
