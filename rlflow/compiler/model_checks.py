"""Checks that the models of roles have the output layers that their nodes need."""

from rlflow.compiler.graph import Graph
from rlflow.compiler.wire import wire
from rlflow.engines.base import choose_head
from rlflow.errors import RecipeError
from rlflow.recipe import Model, Recipe


def check_models(recipe: Recipe, graph: Graph) -> None:
    """Raise RecipeError for a model whose output layer would be random and never trained."""
    for name, role in recipe.roles.items():
        head = choose_head(graph.capabilities(name))
        if head == "vocabulary":
            _check_language_model(role.model, recipe.models[role.model])
        elif head == "value" and name not in graph.trained_roles() and role.follows is None:
            _check_value_model(name, role.model, recipe.models[role.model])


def _check_language_model(name: str, model: Model) -> None:
    if model.recipe is not None and "vocabulary" not in (heads := _trained_heads(model.recipe)):
        fact = f"'{model.recipe.name}' trains a {' and a '.join(heads)} model, which cannot predict tokens"
        raise RecipeError(f"models.{name}.recipe", fact, fix="a recipe that trains a policy, as beginner_tiny")


def _check_value_model(role: str, name: str, model: Model) -> None:
    """Check that a critic which is never trained has a head that is trained; a folder is checked when it is loaded."""
    if model.random_weights or (model.recipe is not None and "value" not in _trained_heads(model.recipe)):
        source = f"models.{name}.{'random_weights' if model.random_weights else 'recipe'}"
        fact = f"'{role}' is never trained, and {source} has no trained value head: its values would be random"
        fix = f"graph.value_update={{node: value_update, role: {role}}}, and roles.{role}.optimizer={{}}"
        raise RecipeError(f"roles.{role}", fact, fix=fix)


def _trained_heads(recipe: Recipe) -> list[str]:
    """Return the output heads of the roles that a recipe trains."""
    graph = wire(recipe)
    return [choose_head(graph.capabilities(role)) for role in graph.trained_roles()]
