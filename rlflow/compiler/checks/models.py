"""Rules about models: their output layers, positions and adapters, and the micro-batches of their roles."""

from collections.abc import Iterator

from rlflow.compiler.graph import Graph
from rlflow.compiler.models import model_architecture, role_architecture
from rlflow.compiler.tasks import step_tasks
from rlflow.compiler.wire import wire
from rlflow.engines.base import choose_head
from rlflow.engines.registry import engine_kind
from rlflow.errors import GraphError, PlacementError, RecipeError, did_you_mean
from rlflow.recipe import Model, Recipe
from rlflow.resources.cluster import Cluster
from rlflow.resources.models.lora import LINEAR_LAYERS

FIX_REWARD_MODEL = "a model that reward_model_update has trained, as {recipe: rm_tiny}"


def check_reward_models(recipe: Recipe, graph: Graph) -> None:
    """Raise RecipeError for a reward model with random weights, or from a recipe that trains no reward model."""
    for name, model in reward_models(recipe, graph):
        if model.random_weights:
            raise RecipeError(
                f"models.{name}.random_weights", "a reward model needs a trained head", fix=FIX_REWARD_MODEL
            )
        if model.recipe is not None:
            trained = wire(model.recipe)
            if not any("Evaluates" in trained.capabilities(role) for role in trained.trained_roles()):
                fact = f"'{model.recipe.name}' does not train a reward model"
                raise RecipeError(f"models.{name}.recipe", fact, fix=FIX_REWARD_MODEL)


def reward_models(recipe: Recipe, graph: Graph) -> Iterator[tuple[str, Model]]:
    """Yield the names and models of the roles that give rewards and are not trained."""
    for name, role in recipe.roles.items():
        if "Evaluates" in graph.capabilities(name) and name not in graph.trained_roles():
            yield role.model, recipe.models[role.model]


def check_output_layers(recipe: Recipe, graph: Graph) -> None:
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


def check_positions(recipe: Recipe, graph: Graph) -> None:
    """Check that models have positions for the longest prompts and responses."""
    for node in graph.nodes:
        sampling = node.operation.sampling
        if sampling is None or node.role is None:
            continue
        architecture = model_architecture(recipe.models[recipe.roles[node.role].model])
        longest = sampling.longest_sequence(recipe.data.max_prompt_tokens)
        prompt = longest - sampling.max_tokens
        positions = architecture.max_position_embeddings if architecture else longest
        if prompt >= positions:
            fact = f"prompts of {prompt} tokens leave no room for responses: the model has {positions} positions"
            raise RecipeError("data.max_prompt_tokens", fact, fix=f"use less than {positions}")
        if longest > positions:
            parts = (
                f"prompts of {prompt} and responses of {sampling.max_tokens}" if prompt else f"sequences of {longest}"
            )
            raise RecipeError(
                f"graph.{node.name}.max_tokens",
                f"{parts} tokens are longer than the model's {positions} positions",
                fix=f"graph.{node.name}.max_tokens={positions - prompt}"
                + (", or a smaller data.max_prompt_tokens" if prompt else ""),
            )


def check_adapters(recipe: Recipe, graph: Graph) -> None:
    """Raise GraphError for adapters of layers that the model does not have, as far as its type's layers are known."""
    for name, role in recipe.roles.items():
        architecture = role_architecture(recipe, graph, name)
        if role.lora is None or architecture is None or not (missing := role.lora.missing_layers(architecture)):
            continue
        path = f"roles.{name}.lora.target_modules"
        fact = f"a {architecture.model_type} has no layer '{missing[0]}' that adapters can stand beside"
        fix = did_you_mean(missing[0], LINEAR_LAYERS) or f"{path}=all-linear, or some of the known layers"
        raise GraphError(path, fact, known=LINEAR_LAYERS, fix=fix)


def check_on_cluster(recipe: Recipe, cluster: Cluster) -> None:
    """Raise PlacementError for a model that no GPU of the cluster computes, and for one of unknown size on GPUs.

    Raises it for adapters beside experts in vLLM on CPUs, too, which has no kernels for them there.
    """
    hosts = [host for host in cluster.hosts if host.usable]
    for role_name, role in recipe.roles.items():
        path, model = f"models.{role.model}", recipe.models[role.model]
        if not any(cluster.computes_in(host, model.dtype) for host in hosts):
            kinds = " and ".join(sorted({host.gpu for host in hosts}))
            fact = f"{kinds} cannot compute in {model.dtype}"
            raise PlacementError(f"{path}.dtype", fact, fix=f"{path}.dtype=float32")
        if model_architecture(model) is None and any(cluster.memory_gib(host) is not None for host in hosts):
            fix = (
                f"{path}.architecture, a card (model@{path}=CARD, conf/model), or a config.json in the folder of "
                f"{path}.path or in the hub's cache: `hf download {model.path or 'NAME'} config.json`"
            )
            fact = f"its architecture is not known, and without it neither memory nor time ({path})"
            raise PlacementError(f"roles.{role_name}.model", fact, fix=fix)
        architecture, on_cpus = model_architecture(model), any(cluster.memory_gib(host) is None for host in hosts)
        has_adapters = role.follows and recipe.lora_of(role_name) and engine_kind(role.engine).concurrent
        if on_cpus and has_adapters and architecture is not None and architecture.num_experts:
            fact = f"'{role.engine}' runs no adapters of a model with experts on a CPU"
            raise PlacementError(f"roles.{role_name}.engine", fact, fix=f"roles.{role.follows}.lora.merge=true")


def check_micro_batches(recipe: Recipe, graph: Graph) -> None:
    """Check that pinned micro-batches have room for the longest expected sequence, or pair of sequences.

    Sequences of the data that are longer than expected are found during the run.
    """
    tasks, prompt = step_tasks(recipe, graph), recipe.data.max_prompt_tokens
    for name, role in sorted(recipe.roles.items()):
        passes = [task for task in tasks if task.role == name and task.kind != "generate"]
        longest = max((task.longest for task in passes if task.is_expected), default=0)
        if role.micro_batch_tokens != "auto" and role.micro_batch_tokens < longest:
            paired = max(task.unit_size for task in passes) > 1
            what, twice, one = ("pair", "twice ", longest // 2) if paired else ("sequence", "", longest)
            raise PlacementError(
                f"roles.{name}.micro_batch_tokens",
                f"{role.micro_batch_tokens} tokens have no room for the longest {what}, which has {longest}: "
                f"{twice}{prompt} in its prompt (data.max_prompt_tokens) and {twice}{one - prompt} in its response",
                fix=f"roles.{name}.micro_batch_tokens={longest}",
            )
