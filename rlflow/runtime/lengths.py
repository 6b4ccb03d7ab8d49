"""Whether the examples and pairs of a data set are as short as the plan takes them to be."""

import numpy as np
from numpy.typing import NDArray

from rlflow.compiler.lower import architecture_of
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.errors import RecipeError
from rlflow.runtime.workers.specs import is_on_gpu

Lengths = NDArray[np.int64]


def check_examples(plan: Plan, data: DataSource) -> None:
    """Raises RecipeError for an example or a pair that has no room in a role's micro-batch or in its model's positions.

    Prompts are within their limit already, and responses that are written end at theirs. Where the size of a
    micro-batch is neither pinned nor a matter of memory, a longer example is one by itself.
    """
    if data.response_ids is None:
        return
    sequences = data.prompt_ids.lengths + data.response_ids.lengths
    if data.rejected_ids is None:
        _check(plan, data, "examples", "split", sequences, sequences)
        return
    _check_pairs(plan, data, "split", sequences, data.prompt_ids.lengths + data.rejected_ids.lengths)
    both = data.held_out_pairs()
    if len(both):
        held_out = both.prompt_ids.lengths + both.response_ids.lengths
        _check_pairs(plan, data, "eval_split", held_out[0::2], held_out[1::2])


def _check_pairs(plan: Plan, data: DataSource, split: str, chosen: Lengths, rejected: Lengths) -> None:
    # Both go through a model in one pass.
    _check(plan, data, "pairs", split, chosen.clip(min=rejected), chosen + rejected)


def _check(plan: Plan, data: DataSource, source: str, split: str, sequences: Lengths, whole: Lengths) -> None:
    """``sequences``: of each row the longest. ``whole``: all that goes through a model in one pass because of it."""
    one, all_of_it = ("example", "example") if source == "examples" else ("longer sequence", "pair")
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
                    f"data.{split}",
                    f"the {what} of row {lengths.argmax()} of '{getattr(data.data, split)}' of '{data.data.source}' "
                    f"has {longest} tokens, and there are {limit} {of}",
                    fix=f"{fix}, or leave such rows out",
                )
