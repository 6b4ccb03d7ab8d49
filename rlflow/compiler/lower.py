"""lower: from a graph to what every role requires, and what a step asks of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlflow.batch import Pairs
from rlflow.compiler.checks import check_groups, check_reward_models, check_rounds, in_rounds
from rlflow.compiler.edges import edges_of
from rlflow.compiler.graph import Graph, GraphNode, wire
from rlflow.engines.base import capabilities_of
from rlflow.engines.registry import engine_kind
from rlflow.errors import PlacementError, RecipeError
from rlflow.nodes.generate import Converse, Generate
from rlflow.recipe import Model, Recipe, Role
from rlflow.resources.demand import Demand
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.architecture import Architecture, with_scalar_head
from rlflow.resources.time.lengths import Lengths, measured
from rlflow.resources.workload import Task, TaskKind, WeightCopy, Workload

_BYTES = {"float32": 4, "bfloat16": 2}
# What a step can ask of an engine, as the planner tells it apart.
_KINDS: Mapping[str, TaskKind] = {
    "Generates": "generate",
    "Trains": "update",
    "Scores": "score",
    "ScoresBase": "score",
    "Values": "score",
    "Evaluates": "score",
}
# Of text in UTF-8, a token: English has 4 to 5 letters a token, numbers and code fewer.
_TEXT_BYTES = 4
# Of the longest that is allowed, the mean that is expected where nothing is known.
_MEAN_SHARE = 0.35


@dataclass(frozen=True, kw_only=True)
class Requirements:
    demands: tuple[Demand, ...]
    """One a role, in the recipe's order of names."""
    workload: Workload


def lower(recipe: Recipe, graph: Graph) -> Requirements:
    """What each role asks of a cluster, whichever it will be.

    Raises RecipeError, GraphError for groups of one and for what cannot be done in rounds, and PlacementError for a
    pinned micro-batch that has no room for the longest sequence.
    """
    trained = graph.trained_roles()
    check_groups(graph)
    check_rounds(recipe, graph)
    check_reward_models(recipe, graph)
    _check_lengths(recipe, graph)
    demands = []
    for name, role in sorted(recipe.roles.items()):
        model, capabilities = recipe.models[role.model], graph.capabilities(name)
        demands.append(
            Demand(
                role=name,
                engine=role.engine,
                parallel=engine_kind(role.engine).parallel,
                trains=name in trained,
                generates="Generates" in capabilities,
                architecture=architecture_played(recipe, graph, name),
                weight_bytes=_BYTES[model.dtype],
                training=training_of(role, model),
                follows_lora=recipe.lora_of(name) if role.follows else None,
                wants=role,
            )
        )
    copies = tuple(
        WeightCopy(source=role.follows, target=name) for name, role in sorted(recipe.roles.items()) if role.follows
    )
    tasks = _tasks(recipe, graph)
    _check_micro_batches(recipe, tasks)
    workload = Workload(tasks=tasks, copies=copies, edges=edges_of(graph, tasks, _text_bytes(recipe)))
    return Requirements(demands=tuple(demands), workload=workload)


def training_of(role: Role, model: Model) -> TrainingMemory:
    """Return how the role's engine keeps what it trains, for the memory model."""
    training = engine_kind(role.engine).training_memory
    # Weights that stand still are in the model's own type.
    return training if role.lora is None else replace(training, weights=_BYTES[model.dtype], lora=role.lora)


def _tasks(recipe: Recipe, graph: Graph) -> tuple[Task, ...]:
    """Nodes in their order. What a node works on comes from the generating nodes that it reads from, or the data."""
    tasks: dict[str, Task] = {}
    streaming = _streaming(recipe, graph)
    for node in graph.nodes:
        after = tuple(origin for origin in node.inputs.values() if origin in tasks)
        capability = node.operation.capability()
        asked = capabilities_of(capability) if capability else frozenset[str]()
        kind: TaskKind = next((kind for name, kind in _KINDS.items() if name in asked), "host")
        if kind == "generate" or not after:
            task = _from_data(recipe, node, kind)
        else:
            most = max((tasks[origin] for origin in after), key=lambda task: task.tokens)
            task = replace(most, node=node.name, role=node.role, kind=kind)
        epochs = getattr(node.operation, "num_epochs", 1)
        tasks[node.name] = replace(
            task,
            after=after,
            streams=node.name in streaming,
            minibatches=getattr(node.operation, "num_minibatches", 1) * epochs,
            epochs=epochs,
        )
    again = {node.name for node in in_rounds(graph)}
    return tuple(
        replace(task, samples=round(task.samples * recipe.expect.rounds)) if task.node in again else task
        for task in tasks.values()
    )


def _streaming(recipe: Recipe, graph: Graph) -> frozenset[str]:
    """The nodes that work while what they read is being written, by an engine that hands over what is done."""
    generators = [node for node in graph.nodes if isinstance(node.operation, Generate) and node.role]
    concurrent = [node for node in generators if engine_kind(recipe.roles[str(node.role)].engine).concurrent]
    return frozenset(follower.name for node in concurrent for follower in graph.followers(node))


def _from_data(recipe: Recipe, node: GraphNode, kind: TaskKind) -> Task:
    """A task over the step's rows: responses are written, or are those of the data."""
    expect, limit = recipe.expect, recipe.data.max_prompt_tokens
    prompts = _lengths(expect.prompt_tokens, limit, "expect.prompt_tokens")
    together = Pairs.unit_size if "pairs" in node.inputs.values() else 1
    if isinstance(node.operation, Generate):
        group_size, longest = node.operation.group_size, node.operation.max_tokens
    else:
        architecture = architecture_of(recipe.models[recipe.roles[node.role].model]) if node.role else None
        group_size, longest = together, max(1, architecture.max_position_embeddings - limit if architecture else limit)
    responses = _lengths(expect.response_tokens, longest, "expect.response_tokens")
    expected = kind == "generate" or expect.response_tokens != "auto"
    if kind != "generate" and expected:
        longest = int(responses.longest)
    return Task(
        node=node.name,
        role=node.role,
        kind=kind,
        samples=recipe.data.batch_size * group_size,
        group_size=group_size,
        prompts=prompts,
        responses=responses,
        longest=together * (limit + longest),
        together=together,
        is_expected=expected,
        turns=node.operation.max_turns if isinstance(node.operation, Converse) else 1,
    )


def _lengths(expected: float | tuple[float, ...] | str, limit: int, path: str) -> Lengths:
    if isinstance(expected, tuple):
        return measured(expected, limit, path)
    if isinstance(expected, str):
        return Lengths.about(_MEAN_SHARE * limit, limit)
    return Lengths.about(measured([expected], limit, path).mean, limit)


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


def _check_micro_batches(recipe: Recipe, tasks: tuple[Task, ...]) -> None:
    """That each has room for the longest sequence that is expected, or for a pair of them. What else the data holds is
    for the run to see."""
    prompt = recipe.data.max_prompt_tokens
    for name, role in sorted(recipe.roles.items()):
        passes = [task for task in tasks if task.role == name and task.kind != "generate"]
        longest = max((task.longest for task in passes if task.is_expected), default=0)
        if role.micro_batch_tokens != "auto" and role.micro_batch_tokens < longest:
            together = max(task.together for task in passes)
            what, twice, each = ("pair", "twice ", longest // 2) if together > 1 else ("sequence", "", longest)
            raise PlacementError(
                f"roles.{name}.micro_batch_tokens",
                f"{role.micro_batch_tokens} tokens have no room for the longest {what}: {longest}, "
                f"{twice}{prompt} of its prompt (data.max_prompt_tokens) and {twice}{each - prompt} of its response",
                fix=f"roles.{name}.micro_batch_tokens={longest}, or shorter sequences",
            )


def architecture_played(recipe: Recipe, graph: Graph, role: str) -> Architecture | None:
    """Its model's, with another head where the graph asks it for values or rewards."""
    architecture = architecture_of(recipe.models[recipe.roles[role].model])
    if architecture is None or graph.capabilities(role).isdisjoint({"Values", "Evaluates"}):
        return architecture
    return with_scalar_head(architecture)


def architecture_of(model: Model) -> Architecture | None:
    """The model's own figures, or those of the model that its recipe trains."""
    if model.architecture is None and model.recipe is not None:
        return architecture_of(trained_model(model.recipe))
    return model.architecture


def _text_bytes(recipe: Recipe) -> float:
    """Of a token as text."""
    of_characters = (
        model.characters or (model.recipe and _text_bytes(model.recipe) == 1)
        for model in models_in_use(recipe).values()
    )
    return 1 if all(of_characters) else _TEXT_BYTES


def trained_role(recipe: Recipe) -> str:
    """The one role that a recipe for a model trains. Raises RecipeError when there are several."""
    trained = wire(recipe).trained_roles()
    if len(trained) != 1:
        raise RecipeError("roles", f"a recipe for a model trains one role, '{recipe.name}' trains {len(trained)}")
    return trained[0]


def trained_model(recipe: Recipe) -> Model:
    """That of the one role that a recipe for a model trains."""
    return recipe.models[recipe.roles[trained_role(recipe)].model]


def models_in_use(recipe: Recipe) -> Mapping[str, Model]:
    """Those that a role plays."""
    return {name: recipe.models[name] for name in sorted({role.model for role in recipe.roles.values()})}
