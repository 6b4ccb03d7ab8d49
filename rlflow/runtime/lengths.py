"""Whether the examples and pairs of a data set are as short as the plan takes them to be."""

from rlflow.compiler.lower import architecture_of
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.errors import RecipeError
from rlflow.runtime.workers.specs import is_on_gpu


def check_examples(plan: Plan, data: DataSource) -> None:
    """Raises RecipeError for an example or a pair that has no room in a role's micro-batch or in its model's positions.

    Prompts are within their limit already, and responses that are written end at theirs. Where the size of a
    micro-batch is neither pinned nor a matter of memory, a longer example is one by itself.
    """
    if data.response_ids is None:
        return
    sequences = whole = data.prompt_ids.lengths + data.response_ids.lengths
    source, one, all_of_it = "examples", "example", "example"
    if data.rejected_ids is not None:
        rejected = data.prompt_ids.lengths + data.rejected_ids.lengths
        # Both go through a model in one pass.
        sequences, whole = sequences.clip(min=rejected), sequences + rejected
        source, one, all_of_it = "pairs", "longer sequence", "pair"
    for node in plan.graph.nodes:
        if node.role is None or source not in node.inputs.values():
            continue
        written, at = plan.recipe.roles[node.role], f"roles.{node.role}.micro_batch_tokens"
        model = architecture_of(plan.recipe.models[written.model])
        limits = []
        if model is not None:
            positions = model.max_position_embeddings
            limits.append((one, sequences, positions, "positions of its model", "a model with more"))
        if is_on_gpu(plan) or written.micro_batch_tokens != "auto":
            tokens = plan.roles[node.role].layout.micro_batch_tokens
            of = f"tokens of a micro-batch of role {node.role}"
            limits.append((all_of_it, whole, tokens, of, f"{at}={whole.max()}"))
        for what, lengths, limit, of, fix in limits:
            if (longest := lengths.max()) > limit:
                raise RecipeError(
                    "data.source",
                    f"the {what} of row {lengths.argmax()} of '{data.data.source}' has {longest} tokens, and there are "
                    f"{limit} {of}",
                    fix=f"{fix}, or leave such rows out",
                )
