"""Whether what is asked for rewards is a reward model, as far as that can be known before anything runs."""

import json
from collections.abc import Iterator
from pathlib import Path

from rlflow.compiler.graph import Graph, wire
from rlflow.errors import RecipeError
from rlflow.recipe import Model, Recipe

_FIX = "a model that reward_model_update has trained, as {recipe: rm_tiny}"


def check_reward_models(recipe: Recipe, graph: Graph) -> None:
    """Raises RecipeError for one with random weights, or of a recipe that makes no reward model."""
    for name, model in _evaluating(recipe, graph):
        if model.random_weights:
            raise RecipeError(f"models.{name}.random_weights", "a reward model has learned its head", fix=_FIX)
        if model.recipe is not None:
            made = wire(model.recipe)
            if not any("Evaluates" in made.capabilities(role) for role in made.trained_roles()):
                fact = f"'{model.recipe.name}' makes no reward model: none of its nodes trains one"
                raise RecipeError(f"models.{name}.recipe", fact, fix=_FIX)


def check_reward_folders(recipe: Recipe, graph: Graph) -> None:
    """Reads ``config.json`` of those that are on this machine. Raises RecipeError for a model of another kind."""
    for name, model in _evaluating(recipe, graph):
        kinds = _kinds(model)
        if kinds and not any(kind.endswith("ForSequenceClassification") for kind in kinds):
            fact = f"'{model.path}' is no reward model: its config.json says {', '.join(kinds)}"
            raise RecipeError(f"models.{name}.path", fact, fix=_FIX)


def _kinds(model: Model) -> list[str]:
    """Nothing where that cannot be told: loading it says what is wrong."""
    if model.path is None:
        return []
    try:
        config = json.loads((Path(model.path).expanduser() / "config.json").read_text())
        return list(config["architectures"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _evaluating(recipe: Recipe, graph: Graph) -> Iterator[tuple[str, Model]]:
    """The names and models of roles that give rewards without being trained."""
    for name, role in recipe.roles.items():
        if "Evaluates" in graph.capabilities(name) and name not in graph.trained_roles():
            yield role.model, recipe.models[role.model]
