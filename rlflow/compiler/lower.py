"""lower: from a graph to what every role requires, and the weight copies between roles."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.compiler.graph import Graph, wire
from rlflow.engines.registry import engine_kind
from rlflow.errors import RecipeError
from rlflow.nodes.generate import Generate
from rlflow.recipe import Model, Recipe
from rlflow.resources.layout import Demand
from rlflow.resources.model import Architecture

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class WeightCopy:
    """After every step, from a trained role to one that follows it."""

    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Requirements:
    demands: tuple[Demand, ...]
    """One a role, in the recipe's order of names."""
    copies: tuple[WeightCopy, ...]


def lower(recipe: Recipe, graph: Graph) -> Requirements:
    """What each role asks of a cluster, whichever it will be. Raises RecipeError."""
    trained = graph.trained_roles()
    _check_lengths(recipe, graph)
    demands = []
    for name, role in sorted(recipe.roles.items()):
        model = recipe.models[role.model]
        architecture = architecture_of(model)
        demands.append(
            Demand(
                role=name,
                engine=role.engine,
                parallel=engine_kind(role.engine).parallel,
                trains=name in trained,
                generates="Generates" in graph.capabilities(name),
                weight_bytes=architecture.num_parameters * _BYTES[model.dtype] if architecture else None,
                num_attention_heads=architecture.num_attention_heads if architecture else None,
                wants=role,
            )
        )
    copies = tuple(
        WeightCopy(source=role.follows, target=name) for name, role in sorted(recipe.roles.items()) if role.follows
    )
    return Requirements(demands=tuple(demands), copies=copies)


def _check_lengths(recipe: Recipe, graph: Graph) -> None:
    for node in graph.nodes:
        if not isinstance(node.operation, Generate) or node.role is None:
            continue
        architecture = architecture_of(recipe.models[recipe.roles[node.role].model])
        prompt, response = recipe.data.max_prompt_tokens, node.operation.max_tokens
        positions = architecture.max_position_embeddings if architecture else prompt + response
        if prompt + response > positions:
            raise RecipeError(
                f"graph.{node.name}.max_tokens",
                f"prompts of {prompt} and responses of {response} tokens are longer than the model's "
                f"{positions} positions",
                fix=f"max_tokens {max(1, positions - prompt)}, or a smaller max_prompt_tokens",
            )


def architecture_of(model: Model) -> Architecture | None:
    """The model's own figures, or those of the model that its recipe trains."""
    if model.architecture is None and model.recipe is not None:
        return architecture_of(model.recipe.models[model.recipe.roles[trained_role(model.recipe)].model])
    return model.architecture


def trained_role(recipe: Recipe) -> str:
    """The one role that a recipe for a model trains. Raises RecipeError when there are several."""
    trained = wire(recipe).trained_roles()
    if len(trained) != 1:
        raise RecipeError("roles", f"a recipe for a model trains one role, '{recipe.name}' trains {len(trained)}")
    return trained[0]


def models_in_use(recipe: Recipe) -> Mapping[str, Model]:
    """Those that a role plays."""
    return {name: recipe.models[name] for name in sorted({role.model for role in recipe.roles.values()})}
