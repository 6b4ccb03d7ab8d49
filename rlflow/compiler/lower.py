"""lower: turn a graph into the requirements of every role and the workload of a step, for any cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.batch import Pairs, Sequences
from rlflow.compiler.checks import check_groups, check_overlap, check_resampling, check_reward_models
from rlflow.compiler.data_checks import check_data
from rlflow.compiler.edges import graph_edges
from rlflow.compiler.graph import SOURCES, Graph, GraphNode, accuracy_node, evaluation_nodes, resampled_nodes
from rlflow.compiler.learning_checks import check_learning
from rlflow.compiler.model_checks import check_models
from rlflow.compiler.response_checks import check_responses
from rlflow.compiler.role_checks import check_targets
from rlflow.compiler.wire import wire
from rlflow.engines.registry import engine_kind
from rlflow.errors import PlacementError, RecipeError
from rlflow.nodes.generate import Generate
from rlflow.recipe import Model, Recipe, Role
from rlflow.resources.demand import Demand
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.architecture import Architecture, with_scalar_head
from rlflow.resources.time.lengths import Lengths, lengths_from
from rlflow.resources.workload import Ahead, Task, TaskKind, WeightSync, Workload

_BYTES = {"float32": 4, "bfloat16": 2}
# The kind of task for each capability; the first match counts.
_TASK_KINDS: Mapping[str, TaskKind] = {
    "Generates": "generate",
    "Trains": "update",
    "Scores": "score",
    "ScoresBase": "score",
    "Values": "score",
    "Evaluates": "score",
}
# Bytes of a token as UTF-8 text: English has 4 to 5 letters in a token, numbers and code have fewer.
_TEXT_BYTES = 4
# The mean length as a share of the limit, where the recipe expects nothing.
_MEAN_SHARE = 0.35


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """The demands of all roles and the workload of a step."""

    demands: tuple[Demand, ...]
    """One for each role, sorted by name."""
    workload: Workload


def lower(recipe: Recipe, graph: Graph) -> Requirements:
    """Return what each role needs and what a step does, whatever the cluster.

    Raises RecipeError, GraphError for groups of one and for nodes that cannot be resampled, and PlacementError for a
    pinned micro-batch that is smaller than the longest sequence.
    """
    trained = graph.trained_roles()
    check_groups(graph)
    check_resampling(recipe, graph)
    check_overlap(recipe, graph)
    check_reward_models(recipe, graph)
    check_data(recipe, graph)
    check_learning(recipe, graph)
    check_models(recipe, graph)
    check_responses(recipe, graph)
    _check_lengths(recipe, graph)
    demands = []
    for name, role in sorted(recipe.roles.items()):
        model, capabilities = recipe.models[role.model], graph.capabilities(name)
        check_targets(name, role, role_architecture(recipe, graph, name))
        demands.append(
            Demand(
                role=name,
                engine=role.engine,
                parallel=engine_kind(role.engine).parallel,
                job="train" if name in trained else "serve" if "Generates" in capabilities else "score",
                architecture=role_architecture(recipe, graph, name),
                weight_bytes=_BYTES[model.dtype],
                training=training_memory(role, model),
                own_process=engine_kind(role.engine).package is not None,
                follows_lora=recipe.lora_of(name) if role.follows else None,
                pins=role,
            )
        )
    syncs = tuple(
        WeightSync(source=role.follows, target=name) for name, role in sorted(recipe.roles.items()) if role.follows
    )
    tasks = _tasks(recipe, graph)
    _check_micro_batches(recipe, tasks)
    workload = Workload(
        tasks=tasks,
        copies=syncs,
        edges=graph_edges(graph, tasks, _text_bytes(recipe)),
        evaluation=_evaluation(recipe, graph, tasks),
        ahead=_ahead(recipe, graph),
    )
    return Requirements(demands=tuple(demands), workload=workload)


def training_memory(role: Role, model: Model) -> TrainingMemory:
    """Return how the role's engine keeps weights, gradients and optimizer, for the memory model."""
    training = engine_kind(role.engine).training_memory
    # Frozen weights keep the model's own type, and trained ones at least its size.
    if role.lora is not None:
        return replace(training, weights=_BYTES[model.dtype], lora=role.lora)
    return replace(training, weights=max(training.weights, _BYTES[model.dtype]))


def _tasks(recipe: Recipe, graph: Graph) -> tuple[Task, ...]:
    """Return a task for each node, in order. Its samples come from the nodes that it reads, or from the data."""
    tasks: dict[str, Task] = {}
    streaming = _streaming(recipe, graph)
    for node in graph.nodes:
        after = tuple(origin for origin in node.inputs.values() if origin in tasks)
        kind: TaskKind = next((kind for name, kind in _TASK_KINDS.items() if name in node.capabilities), "host")
        if kind == "generate" or not after:
            task = _from_data(recipe, node, kind)
        else:
            largest = max((tasks[origin] for origin in after), key=lambda task: task.tokens)
            task = replace(largest, node=node.name, role=node.role, kind=kind)
        epochs = getattr(node.operation, "num_epochs", 1)
        tasks[node.name] = replace(
            task,
            after=after,
            hosts_of=_hosts_of(node, graph, tasks),
            streams=node.name in streaming,
            minibatches=getattr(node.operation, "num_minibatches", 1) * epochs,
            epochs=epochs,
        )
    resampled = {node.name for node in resampled_nodes(graph)}
    return tuple(
        replace(task, samples=round(task.samples * recipe.expect.rounds)) if task.node in resampled else task
        for task in tasks.values()
    )


def _hosts_of(node: GraphNode, graph: Graph, tasks: Mapping[str, Task]) -> str | None:
    """Return the role on whose hosts a node without a role finds its samples."""
    outputs = {**SOURCES, **{other.name: other.operation.output() for other in graph.nodes}}
    samples = next((origin for origin in node.inputs.values() if issubclass(outputs[origin], Sequences)), None)
    if samples is None or samples not in tasks or not node.runs_on_every_host:
        return None
    return tasks[samples].role or tasks[samples].hosts_of


def _evaluation(recipe: Recipe, graph: Graph, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return the tasks of an evaluation: the responses to held-out prompts, or the scores of held-out pairs."""
    options = recipe.evaluation
    if options is None:
        return ()
    sets = options.sets_with(recipe.data.eval_split).values()
    if graph.evaluation_metric == "accuracy" and (update := accuracy_node(graph)) is not None:
        scoring = tasks[: graph.nodes.index(update) + 1]
        count = sum(options.prompts_of(each) for each in sets)
        pairs = (replace(task, samples=count * task.unit_size, after=(), streams=False) for task in scoring)
        return tuple(replace(task, kind="score" if task.kind == "update" else task.kind) for task in pairs)
    names = [node.name for node in evaluation_nodes(graph) or ()]
    measured = [replace(task, after=(), streams=False) for task in tasks if task.node in names]
    numbers = [(options.prompts_of(each), options.responses_of(each)) for each in sets]
    return tuple(
        replace(task, samples=prompts * responses, group_size=responses)
        for prompts, responses in numbers
        for task in measured
    )


def _ahead(recipe: Recipe, graph: Graph) -> Ahead | None:
    if not recipe.overlap.max_staleness:
        return None
    return Ahead(nodes=tuple(node.name for node in graph.ahead_nodes()), overlap=recipe.overlap)


def _streaming(recipe: Recipe, graph: Graph) -> frozenset[str]:
    """Return the nodes that start while generation still runs, on an engine that reports finished samples."""
    generators = [node for node in graph.nodes if isinstance(node.operation, Generate) and node.role]
    concurrent = [node for node in generators if engine_kind(recipe.roles[str(node.role)].engine).concurrent]
    return frozenset(consumer.name for node in concurrent for consumer in graph.streaming_consumers(node))


def _from_data(recipe: Recipe, node: GraphNode, kind: TaskKind) -> Task:
    """Return a task over the step's rows, whose responses are generated or come from the data."""
    expect, limit = recipe.expect, recipe.data.max_prompt_tokens
    prompts = _lengths(expect.prompt_tokens, limit, "expect.prompt_tokens")
    unit_size = Pairs.unit_size if "pairs" in node.inputs.values() else 1
    if isinstance(node.operation, Generate):
        group_size, longest = node.operation.group_size, node.operation.max_tokens
    else:
        architecture = model_architecture(recipe.models[recipe.roles[node.role].model]) if node.role else None
        group_size, longest = unit_size, max(1, architecture.max_position_embeddings - limit if architecture else limit)
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
        longest=unit_size * (limit + longest),
        unit_size=unit_size,
        is_expected=expected,
        turns=node.operation.num_turns if isinstance(node.operation, Generate) else 1,
    )


def _lengths(expected: float | tuple[float, ...] | str, limit: int, path: str) -> Lengths:
    if isinstance(expected, tuple):
        return lengths_from(expected, limit, path)
    if isinstance(expected, str):
        return Lengths.log_normal(_MEAN_SHARE * limit, limit)
    return Lengths.log_normal(lengths_from([expected], limit, path).mean, limit)


def _check_lengths(recipe: Recipe, graph: Graph) -> None:
    for node in graph.nodes:
        if not isinstance(node.operation, Generate) or node.role is None:
            continue
        architecture = model_architecture(recipe.models[recipe.roles[node.role].model])
        prompt, response = recipe.data.max_prompt_tokens, node.operation.max_tokens
        positions = architecture.max_position_embeddings if architecture else prompt + response
        if prompt >= positions:
            fact = f"prompts of {prompt} tokens leave no room for responses: the model has {positions} positions"
            raise RecipeError("data.max_prompt_tokens", fact, fix=f"use less than {positions}")
        if prompt + response > positions:
            raise RecipeError(
                f"graph.{node.name}.max_tokens",
                f"prompts of {prompt} and responses of {response} tokens are longer than the model's "
                f"{positions} positions",
                fix=f"graph.{node.name}.max_tokens={positions - prompt}, or a smaller data.max_prompt_tokens",
            )


def _check_micro_batches(recipe: Recipe, tasks: tuple[Task, ...]) -> None:
    """Check that pinned micro-batches have room for the longest expected sequence, or pair of sequences.

    Sequences of the data that are longer than expected are found during the run.
    """
    prompt = recipe.data.max_prompt_tokens
    for name, role in sorted(recipe.roles.items()):
        passes = [task for task in tasks if task.role == name and task.kind != "generate"]
        longest = max((task.longest for task in passes if task.is_expected), default=0)
        if role.micro_batch_tokens != "auto" and role.micro_batch_tokens < longest:
            paired = max(task.unit_size for task in passes) > 1
            what, twice, each = ("pair", "twice ", longest // 2) if paired else ("sequence", "", longest)
            raise PlacementError(
                f"roles.{name}.micro_batch_tokens",
                f"{role.micro_batch_tokens} tokens have no room for the longest {what}, which has {longest}: "
                f"{twice}{prompt} in its prompt (data.max_prompt_tokens) and {twice}{each - prompt} in its response",
                fix=f"roles.{name}.micro_batch_tokens={longest}",
            )


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


def _text_bytes(recipe: Recipe) -> float:
    """Return the expected bytes of a token as text: one where every model's tokens are characters."""
    are_characters = (
        model.characters or (model.recipe and _text_bytes(model.recipe) == 1)
        for model in models_in_use(recipe).values()
    )
    return 1 if all(are_characters) else _TEXT_BYTES


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
