"""Rules about the data that need no rows: its function, its name, its columns, and the system prompt."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlflow.compiler.graph import Graph
from rlflow.errors import RecipeError
from rlflow.extras import check_trackers
from rlflow.plugins import check_module
from rlflow.recipe import Model, Recipe


def check_modules(recipe: Recipe, graph: Graph) -> None:
    """Check that the modules of functions that give data can be imported, and the libraries of trackers."""
    for path, source, _, _ in data_sources(recipe):
        if ":" in source:
            check_module(source, f"{path}.source")
    check_trackers(recipe.trackers)


def check_data(recipe: Recipe, graph: Graph) -> None:
    """Raise RecipeError for a name of a function's data, pairs that are ties, and prompts that cannot be encoded."""
    for path, source, name, _ in data_sources(recipe):
        if name is not None and ":" in source:
            fact = f"only data sets on the hub have named configurations, and '{source}' is a function"
            raise RecipeError(f"{path}.name", fact, fix=f"{path}.name=null")
    if recipe.data.train_on == "all" and "examples" not in graph.sources:
        fact = "chooses what supervised training learns, and no node reads examples"
        raise RecipeError("data.train_on", fact, fix="data.train_on=last")
    if "pairs" in graph.sources:
        _check_pairs(recipe)
    model = recipe.models[recipe.roles[graph.tokenizer_role()].model]
    if recipe.data.system_prompt is not None and model.chat_template is None and _has_characters(model):
        fact = "needs a chat template, and a tokenizer whose tokens are 'characters' has none"
        raise RecipeError("data.system_prompt", fact, fix="data.system_prompt=null")


def data_sources(recipe: Recipe) -> Iterator[tuple[str, str, str | None, Mapping[str, Any]]]:
    """Yield the path, source, name and options of the training data, and of each evaluation set."""
    data = recipe.data
    yield "data", data.source, data.name, data.options
    for name, held_out in recipe.evaluation.sets.items() if recipe.evaluation else ():
        yield f"evaluation.sets.{name}", held_out.source or data.source, held_out.name, held_out.options


def _check_pairs(recipe: Recipe) -> None:
    """Raise RecipeError for pairs whose two responses are the same column."""
    sets = recipe.evaluation.sets if recipe.evaluation else {}
    tables = {"data.columns": recipe.data.columns}
    sets_with_source = {name: held_out for name, held_out in sets.items() if held_out.source}
    tables |= {f"evaluation.sets.{name}.columns": held_out.columns for name, held_out in sets_with_source.items()}
    for path, columns in tables.items():
        if (column := columns.get("chosen", "chosen")) == columns.get("rejected", "rejected"):
            fact = f"chosen and rejected are both '{column}', so that all pairs are ties"
            raise RecipeError(path, fact, fix="name two columns: {chosen: COLUMN, rejected: OTHER}")


def _has_characters(model: Model) -> bool:
    """Return whether each token of a model is a character, as for random weights and what is trained from them."""
    if model.recipe is not None:
        return all(map(_has_characters, model.recipe.models.values()))
    return model.characters is not None
