"""The models of a recipe: which are in use, their architectures, and the models that other recipes train."""

from collections.abc import Mapping
from dataclasses import replace

from rlflow.batch.routing import record_bytes
from rlflow.compiler.graph import Graph
from rlflow.compiler.wire import wire
from rlflow.engines.registry import engine_kind
from rlflow.errors import RecipeError
from rlflow.recipe import Model, Recipe, Role
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.architecture import Architecture, with_scalar_head
from rlflow.resources.models.vision import trains_images

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
"""The bytes of a weight by its number type."""


def training_memory(role: Role, model: Model) -> TrainingMemory:
    """Return how the role's engine keeps weights, gradients and optimizer, for the memory model."""
    memory = engine_kind(role.engine).training_memory[model.dtype]
    if role.lora is None:
        muon = role.optimizer is not None and role.optimizer.kind == "muon"
        return replace(memory, trains_vision=trains_images(role.train), muon=muon)
    # Frozen weights are in the model's type.
    weights = WEIGHT_BYTES[model.dtype]
    return replace(memory, lora=role.lora, weights=weights, merged_experts=weights if role.lora.experts else 0)


def replays_routing(recipe: Recipe, graph: Graph, role: str) -> bool:
    """Return whether a role trains with the experts that another one used, or is the one that records them.

    Reference models, critics and reward models choose their own experts.
    """
    trained = recipe.roles[role].follows or role
    heads = graph.capabilities(trained) & {"Values", "Evaluates"}
    architecture = model_architecture(recipe.models[recipe.roles[trained].model])
    has_experts = architecture is None or architecture.num_experts is not None
    if not recipe.roles[trained].routing_replay or not has_experts or heads or trained not in graph.trained_roles():
        return False
    samplers = [
        name
        for name, other in recipe.roles.items()
        if other.follows == trained and "Generates" in graph.capabilities(name)
    ]
    return role in samplers or (role == trained and bool(samplers))


def routing_bytes(recipe: Recipe, graph: Graph, role: str) -> int:
    """Return the bytes of the experts of a token that a role generates; 0 where nobody replays them."""
    model = model_architecture(recipe.models[recipe.roles[role].model])
    if model is None or not model.num_experts or not replays_routing(recipe, graph, role):
        return 0
    return record_bytes(model.num_experts, model.num_sparse_layers, model.num_experts_per_tok or 1)


def role_architecture(recipe: Recipe, graph: Graph, role: str) -> Architecture | None:
    """Return the architecture of the role's model, with a scalar head where it gives values or rewards."""
    architecture = model_architecture(recipe.models[recipe.roles[role].model])
    if architecture is None or graph.capabilities(role).isdisjoint({"Values", "Evaluates"}):
        return architecture
    return with_scalar_head(architecture)


def model_architecture(model: Model) -> Architecture | None:
    """Return the model's own figures, or those of the model that its recipe trains."""
    if model.architecture is None and model.recipe is not None:
        return model_architecture(trained_model(model.recipe))
    return model.architecture


def may_see_images(recipe: Recipe, graph: Graph) -> bool:
    """Return whether the model that reads the prompts can see images, as far as its figures are known."""
    architecture = model_architecture(recipe.models[recipe.roles[graph.tokenizer_role()].model])
    return architecture is None or architecture.num_encoder_parameters > 0


def trained_role(recipe: Recipe) -> str:
    """Return the one role that a recipe for a model trains. Raises RecipeError when it trains several."""
    trained = wire(recipe).trained_roles()
    if len(trained) != 1:
        fact = f"a recipe for a model trains one role, '{recipe.name}' trains {len(trained)}"
        fix = "models.NAME.recipe=grpo_tiny, or another recipe that trains one role"
        raise RecipeError("roles", fact, fix=fix)
    return trained[0]


def trained_model(recipe: Recipe) -> Model:
    """Return the model of the one role that a recipe for a model trains."""
    return recipe.models[recipe.roles[trained_role(recipe)].model]


def models_in_use(recipe: Recipe) -> Mapping[str, Model]:
    """Return the models that some role uses, by name."""
    return {name: recipe.models[name] for name in sorted({role.model for role in recipe.roles.values()})}
