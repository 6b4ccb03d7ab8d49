"""Whether models that read each other's tokens mean the same by them."""

from rlflow.compiler.lower import trained_model
from rlflow.compiler.plan import Plan
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import RecipeError
from rlflow.recipe import Recipe

# What an engine that is asked for any of these has tokens for, or makes of them.
_WITH_TOKENS = {"Generates", "Scores", "Values", "Evaluates", "Trains"}


def check_vocabularies(plan: Plan) -> None:
    """Between models tokens travel as numbers, those of the tokenizer that encodes prompts; a model may know others.

    No model that a recipe makes need be there. Raises RecipeError for one with another number for a token, or none.
    """
    recipe, graph = plan.recipe, plan.graph
    ours = recipe.roles[graph.reading_role()].model
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
