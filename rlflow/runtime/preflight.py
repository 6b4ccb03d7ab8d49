"""Whether models that read each other's tokens mean the same by them.

Whether the examples and pairs of a data set are as short as the plan takes them to be.
"""

import numpy as np
from numpy.typing import NDArray

from rlflow.compiler.lower import model_architecture, trained_model
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import RecipeError
from rlflow.recipe import Recipe
from rlflow.runtime.ray.engine_specs import is_on_gpu

# What an engine that is asked for any of these has tokens for, or makes of them.
_WITH_TOKENS = {"Generates", "Scores", "Values", "Evaluates", "Trains"}


def check_vocabularies(plan: Plan) -> None:
    """Between models tokens travel as numbers, those of the tokenizer that encodes prompts; a model may know others.

    No model that a recipe makes need be there. Raises RecipeError for one with another number for a token, or none.
    """
    recipe, graph = plan.recipe, plan.graph
    ours = recipe.roles[graph.tokenizer_role()].model
    others = {
        role.model: name
        for name, role in recipe.roles.items()
        if role.model != ours and graph.capabilities(name) & _WITH_TOKENS
    }
    vocabulary = _vocabulary(recipe, ours) if others else {}
    for model, role in others.items():
        theirs = _vocabulary(recipe, model)
        for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
            if theirs.get(token) != number:
                has = f"has number {theirs[token]}" if token in theirs else "is not there"
                raise RecipeError(
                    f"roles.{role}.model",
                    f"'{model}' reads tokens of '{ours}', and of these number {number}, '{token}', {has}",
                    fix="a model with the same tokenizer",
                )


def _vocabulary(recipe: Recipe, name: str) -> dict[str, int]:
    """Training leaves a tokenizer as it is."""
    model = recipe.models[name]
    while model.recipe is not None:
        model = trained_model(model.recipe)
    vocabulary: dict[str, int] = load_tokenizer(name, model).get_vocab()
    return vocabulary


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
        model = model_architecture(plan.recipe.models[written.model])
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
