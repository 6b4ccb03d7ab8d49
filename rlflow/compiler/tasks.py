"""The tasks of a step and of an evaluation: what each node works on, and how long its sequences are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from rlflow.batch import Pairs, Sequences
from rlflow.compiler.graph import SOURCES, Graph, accuracy_node, evaluation_nodes, resampled_nodes
from rlflow.compiler.models import model_architecture
from rlflow.engines.registry import engine_kind
from rlflow.errors import RecipeError
from rlflow.nodes.base import GraphNode
from rlflow.recipe import Recipe
from rlflow.resources.time.lengths import Lengths, lengths_from
from rlflow.resources.time.turns import ONE_TURN, TurnProfile
from rlflow.resources.workload import Task, TaskKind

# The kind of task for each capability; the first match counts.
_TASK_KINDS: Mapping[str, TaskKind] = {
    "Generates": "generate",
    "Trains": "update",
    "Scores": "score",
    "ScoresBase": "score",
    "ScoresTop": "score",
    "Values": "score",
    "Evaluates": "score",
}
# The mean length as a share of the limit, where the recipe expects nothing.
_MEAN_SHARE = 0.35


def step_tasks(recipe: Recipe, graph: Graph) -> tuple[Task, ...]:
    """Return a task for each node with work, in order. Its samples come from the nodes it reads, or from the data."""
    tasks: dict[str, Task] = {}
    streaming = _streaming(recipe, graph)
    for node in (node for node in graph.nodes if node.operation.sample_share):
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
            samples=round(task.samples * node.operation.sample_share),
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


def evaluation_tasks(recipe: Recipe, graph: Graph, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return the tasks of an evaluation: the responses to held-out prompts, or the scores of held-out pairs."""
    options = recipe.evaluation
    if options is None:
        return ()
    sets = options.sets_with(recipe.data.eval_split).values()
    if graph.evaluation_metric == "accuracy" and (update := accuracy_node(graph)) is not None:
        scoring = tasks[: graph.nodes.index(update) + 1]
        count = sum(options.prompts_of(held_out) for held_out in sets)
        pairs = (replace(task, samples=count * task.unit_size, after=(), streams=False) for task in scoring)
        return tuple(replace(task, kind="score" if task.kind == "update" else task.kind) for task in pairs)
    names = [node.name for node in evaluation_nodes(graph) or ()]
    measured = [replace(task, after=(), streams=False) for task in tasks if task.node in names]
    numbers = [(options.prompts_of(held_out), options.responses_of(held_out)) for held_out in sets]
    return tuple(
        replace(task, samples=prompts * responses, group_size=responses)
        for prompts, responses in numbers
        for task in measured
    )


def _streaming(recipe: Recipe, graph: Graph) -> frozenset[str]:
    """Return the nodes that start while generation still runs, on an engine that reports finished samples."""
    generators = [node for node in graph.nodes if node.operation.sampling and node.role]
    concurrent = [node for node in generators if engine_kind(recipe.roles[str(node.role)].engine).concurrent]
    return frozenset(consumer.name for node in concurrent for consumer in graph.streaming_consumers(node))


def _from_data(recipe: Recipe, node: GraphNode, kind: TaskKind) -> Task:
    """Return a task over the step's rows, whose responses are generated or come from the data."""
    expect, limit = recipe.expect, recipe.data.max_prompt_tokens
    prompts = _lengths(expect.prompt_tokens, limit, "expect.prompt_tokens")
    unit_size = Pairs.unit_size if "pairs" in node.inputs.values() else 1
    if (sampling := node.operation.sampling) is not None:
        group_size, longest = sampling.group_size, sampling.max_tokens
    else:
        architecture = model_architecture(recipe.models[recipe.roles[node.role].model]) if node.role else None
        group_size, longest = unit_size, max(1, architecture.max_position_embeddings - limit if architecture else limit)
    limit_of_segments = longest * ceil(expect.segments)
    generated = _lengths(expect.response_tokens, limit_of_segments, "expect.response_tokens")
    turns = _turns(recipe, node) if node.operation.num_turns > 1 else ONE_TURN
    added = turns.added_tokens
    responses = Lengths(tuple(min(limit_of_segments, length + added) for length in generated.values))
    if responses.mean <= added:
        fact = f"{turns.count:g} turns add {added:.0f} tokens, and responses have {limit_of_segments} at most"
        raise RecipeError("expect.observation_tokens", fact, fix="a smaller number, or a larger max_tokens")
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
        image_tokens=min(expect.image_tokens, prompts.mean),
        responses=responses,
        longest=unit_size * (limit + longest if sampling is None else sampling.longest_sequence(limit)),
        unit_size=unit_size,
        is_expected=expected,
        turns=turns,
    )


def _turns(recipe: Recipe, node: GraphNode) -> TurnProfile:
    expect, limit = recipe.expect, node.operation.num_turns
    return TurnProfile(
        count=limit if expect.turns == "auto" else min(expect.turns, limit),
        wait_s=expect.wait_s,
        observation_tokens=expect.observation_tokens,
        segments=expect.segments,
        cpu_s=getattr(node.operation, "turn_cpu_s", 0.0),
    )


def _lengths(expected: float | tuple[float, ...] | str, limit: int, path: str) -> Lengths:
    if isinstance(expected, tuple):
        return lengths_from(expected, limit, path)
    if isinstance(expected, str):
        return Lengths.log_normal(_MEAN_SHARE * limit, limit)
    return Lengths.log_normal(lengths_from([expected], limit, path).mean, limit)
