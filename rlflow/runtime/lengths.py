"""Whether the examples of a data set are as short as the plan takes them to be."""

from rlflow.compiler.lower import architecture_of
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.errors import RecipeError
from rlflow.runtime.workers.specs import is_on_gpu


def check_examples(plan: Plan, data: DataSource) -> None:
    """Raises RecipeError for an example that has no room in a role's micro-batch, or in its model's positions.

    Prompts are within their limit already, and responses that are written end at theirs. Where the size of a
    micro-batch is neither pinned nor a matter of memory, a longer example is one by itself.
    """
    if data.response_ids is None:
        return
    lengths = data.prompt_ids.lengths + data.response_ids.lengths
    row = int(lengths.argmax())
    for node in plan.graph.nodes:
        if node.role is None or "examples" not in node.inputs.values():
            continue
        model = architecture_of(plan.recipe.models[plan.recipe.roles[node.role].model])
        limits = {}
        if is_on_gpu(plan) or plan.recipe.roles[node.role].micro_batch_tokens != "auto":
            tokens = plan.roles[node.role].layout.micro_batch_tokens
            limits[f"tokens of a micro-batch of role {node.role}"] = tokens
        if model is not None:
            limits["positions of its model"] = model.max_position_embeddings
        what, limit = min(limits.items(), key=lambda each: each[1], default=("", lengths[row]))
        if lengths[row] > limit:
            longer = f"roles.{node.role}.micro_batch_tokens={lengths[row]}" if "micro" in what else "a model with more"
            raise RecipeError(
                "data.source",
                f"the example of row {row} of '{data.data.source}' has {lengths[row]} tokens, and there are "
                f"{limit} {what}",
                fix=f"{longer}, or leave such rows out",
            )
