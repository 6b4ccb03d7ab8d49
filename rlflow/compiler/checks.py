"""Checks of a whole graph before it is lowered: groups, pairs, reward models and resampling; and warnings about it."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rlflow.compiler.data_checks import data_warnings
from rlflow.compiler.graph import SOURCES, Graph, GraphNode, resampled_nodes
from rlflow.compiler.wire import wire
from rlflow.engines.registry import engine_kind
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.base import NodeContext
from rlflow.nodes.generate import Generate
from rlflow.recipe import Model, Recipe, Trace

_FIX = "a model that reward_model_update has trained, as {recipe: rm_tiny}"


def check_groups(graph: Graph) -> None:
    """Check that responses come in the groups and pairs in which nodes compare them. Raises GraphError."""
    _check_pairs(graph)
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.operation.compares_groups:
            _check_group_size(node, nodes)
        _check_required_options(node, nodes)


def _check_pairs(graph: Graph) -> None:
    others = sorted(graph.sources - {"pairs"})
    if "pairs" in graph.sources and others:
        reading = next(node for node in graph.nodes if others[0] in node.inputs.values())
        fact = f"it reads {others[0]}, and other nodes read pairs: the rows of a run can only be one of them"
        raise GraphError(f"graph.{reading.name}", fact, fix="two recipes, the second with models.NAME.recipe the first")


def _check_group_size(node: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    """Raise GraphError if all responses that the node reads, however indirectly, come in groups of one."""
    generators = _generators_before(node, nodes)
    if generators and all(generator.group_size == 1 for generator in generators.values()):
        path = f"graph.{next(iter(generators))}.group_size"
        fact = "compares the responses to a prompt, but group_size is 1"
        raise GraphError(f"graph.{node.name}", fact, fix=f"{path}=8, or any number from 2")


def _generators_before(node: GraphNode, nodes: Mapping[str, GraphNode]) -> dict[str, Generate]:
    """Return the nodes, by name, that generate the responses which a node reads, directly or through other nodes."""
    generators: dict[str, Generate] = {}
    for origin in (nodes[name] for name in node.inputs.values() if name in nodes):
        if isinstance(origin.operation, Generate):
            generators[origin.name] = origin.operation
        else:
            generators |= _generators_before(origin, nodes)
    return generators


def _check_required_options(node: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    """Raise GraphError if a node that is connected to an input lacks an option that the input requires."""
    for name, options in node.operation.required_options.items():
        origin = nodes.get(node.inputs.get(name, ""))
        for option, value in options.items() if origin else ():
            assert origin is not None
            path, actual = f"graph.{origin.name}.{option}", getattr(origin.operation, option, value)
            if actual != value:
                fact = f"is {actual}, but input '{name}' of graph.{node.name} requires {value}"
                same_kind = [each for each in nodes.values() if isinstance(each.operation, type(origin.operation))]
                fits = [each.name for each in same_kind if getattr(each.operation, option) == value]
                fix = f"graph.{node.name}.{name}={fits[0]}" if fits else f"{path}={value}"
                raise GraphError(path, fact, fix=fix)


def check_reward_models(recipe: Recipe, graph: Graph) -> None:
    """Raise RecipeError for a reward model with random weights, or from a recipe that trains no reward model."""
    for name, model in _reward_models(recipe, graph):
        if model.random_weights:
            raise RecipeError(f"models.{name}.random_weights", "a reward model needs a trained head", fix=_FIX)
        if model.recipe is not None:
            trained = wire(model.recipe)
            if not any("Evaluates" in trained.capabilities(role) for role in trained.trained_roles()):
                fact = f"'{model.recipe.name}' does not train a reward model"
                raise RecipeError(f"models.{name}.recipe", fact, fix=_FIX)


def check_reward_folders(recipe: Recipe, graph: Graph) -> None:
    """Read ``config.json`` of the reward models on this machine. Raises RecipeError for a model of another kind."""
    for name, model in _reward_models(recipe, graph):
        classes = _model_classes(model)
        if classes and not any(each.endswith("ForSequenceClassification") for each in classes):
            fact = f"'{model.path}' is not a reward model: its config.json names {', '.join(classes)}"
            raise RecipeError(f"models.{name}.path", fact, fix=_FIX)


def _model_classes(model: Model) -> list[str]:
    """Return the classes that a model's ``config.json`` names; none where it cannot be read, which loading reports."""
    if model.path is None:
        return []
    try:
        config = json.loads((Path(os.path.expanduser(model.path)) / "config.json").read_text())
        return list(config["architectures"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _reward_models(recipe: Recipe, graph: Graph) -> Iterator[tuple[str, Model]]:
    """Yield the names and models of the roles that give rewards and are not trained."""
    for name, role in recipe.roles.items():
        if "Evaluates" in graph.capabilities(name) and name not in graph.trained_roles():
            yield role.model, recipe.models[role.model]


def check_resampling(recipe: Recipe, graph: Graph) -> None:
    """Check that all nodes work together with dynamic sampling, which runs some of them several times in a step.

    Raises GraphError, and RecipeError where ``expect.rounds`` is set and no node samples dynamically.
    """
    sampling = [node.name for node in graph.nodes if node.selects_prompts]
    if not sampling:
        if recipe.expect.rounds != 1:
            raise RecipeError("expect.rounds", "no node 'dynamic_sampling' asks for more prompts", fix="leave it out")
        return
    path = f"graph.{sampling[0]}"
    if len(sampling) > 1:
        raise GraphError(path, f"{' and '.join(sampling)} would each choose the prompts of a step", fix="leave one")
    for node in graph.nodes:
        for source in SOURCES.keys() & node.inputs.values():
            if source != "prompts":
                fact = f"it reads all {source} of a step, and {path} chooses prompts"
                raise GraphError(f"graph.{node.name}", fact, fix=f"remove graph.{node.name}, or {path}")
        if node in resampled_nodes(graph) and node.operation.new_state() is not None:
            fact = f"keeps a state that changes once a step, and {path} runs it several times in a step"
            fix = f"remove the option that needs the state (as kl_target), or {path}"
            raise GraphError(f"graph.{node.name}", fact, fix=fix)


def check_overlap(recipe: Recipe, graph: Graph) -> None:
    """Check that generation can run ahead of training as the recipe asks. Raises RecipeError and GraphError."""
    options = recipe.overlap
    if not options.max_staleness:
        return
    path = "overlap.max_staleness"
    ahead = [node for node in graph.ahead_nodes() if isinstance(node.operation, Generate)]
    if not ahead:
        raise RecipeError(path, "no node generates from the prompts of the data", fix=f"{path}=0")
    for node in ahead:
        role = str(node.role)
        if recipe.roles[role].follows is None:
            trained = role in graph.trained_roles()
            why = "is trained itself, so it cannot generate meanwhile" if trained else "follows no trained role"
            raise RecipeError(path, f"role '{role}' of graph.{node.name} {why}", fix=f"{path}=0")
        others = [each for each in graph.nodes if each.role == role and each not in ahead]
        if others:
            fact = f"role '{role}' also runs graph.{others[0].name}, which belongs to the step that trains"
            raise RecipeError(path, fact, fix=f"another role for graph.{others[0].name}, or {path}=0")
    if resampled := resampled_nodes(graph):
        name = resampled[-1].name
        fact = f"graph.{name} chooses the prompts of a step by their rewards, which needs that step's policy"
        raise RecipeError(path, fact, fix=f"{path}=0, or no graph.{name}")
    if options.in_flight != "wait":
        _check_in_flight(recipe, ahead)


def _check_in_flight(recipe: Recipe, generators: Sequence[GraphNode]) -> None:
    """Raise RecipeError where new weights cannot interrupt the generation of these nodes."""
    path, value = "overlap.in_flight", recipe.overlap.in_flight
    if recipe.overlap.deterministic:
        fact = f"'{value}' lets the moment at which weights arrive decide which version samples a token"
        raise RecipeError(path, fact, fix="overlap.deterministic=false, or overlap.in_flight=wait")
    if len(generators) > 1:
        names = " and ".join(f"graph.{node.name}" for node in generators)
        raise RecipeError(path, f"'{value}' works for one node that generates, got {names}", fix=f"{path}=wait")
    engine, node = recipe.roles[str(generators[0].role)].engine, generators[0]
    if not engine_kind(engine).concurrent:
        fact = f"expected an engine that can be interrupted, got '{engine}' for graph.{node.name}"
        raise RecipeError(path, fact, fix=f"{path}=wait, or roles.{node.role}.engine=vllm")
    operation = node.operation
    if isinstance(operation, Generate) and not operation.can_stream:
        raise RecipeError(
            path, f"graph.{node.name} cannot be interrupted, because it overrides run", fix=f"{path}=wait"
        )


def check_recorded_steps(steps: int, trace: Trace, profile: Collection[int]) -> None:
    """Raise RecipeError for a step to be traced or profiled that is not among the ``steps`` of a run."""
    for option, chosen in (("trace", () if isinstance(trace, bool) else trace), ("profile", profile)):
        if others := [step for step in chosen if not 1 <= step <= steps]:
            fact = f"step {others[0]} comes after the last step of the run, {steps}"
            if others[0] < 1:
                fact = f"step {others[0]} comes before the first step of a run, 1"
            raise RecipeError(option, fact, fix=f"steps from 1 to {steps}")


def graph_warnings(recipe: Recipe, graph: Graph) -> Iterator[str]:
    """Yield the warnings of nodes about their options, rounds of resampling, and models that an engine cannot run."""
    for node in graph.nodes:
        for line in node.operation.cautions(_context(recipe, graph, node)):
            yield f"graph.{node.name}.{line}"
    if resampled := resampled_nodes(graph):
        yield (
            f"graph.{resampled[-1].name}: the plan expects responses for {recipe.expect.rounds:g} x the prompts that "
            "are trained on (expect.rounds)"
        )
    yield from data_warnings(recipe)
    for name, role in recipe.roles.items():
        model = recipe.models[role.model].architecture
        if model is not None and not engine_kind(role.engine).concurrent:
            kinds = ["a sliding window"] * bool(model.num_windowed_layers) + ["a recurrence"] * bool(model.recurrent)
            if kinds:
                layers = f"layers with {' and '.join(kinds)}"
                yield f"roles.{name}: the plan holds, but '{role.engine}' refuses models that have {layers}"


def _context(recipe: Recipe, graph: Graph, node: GraphNode) -> NodeContext:
    role = recipe.roles[node.role] if node.role else None
    read = [each for each in graph.nodes if each.name in node.inputs.values() and isinstance(each.operation, Generate)]
    return NodeContext(
        connected=frozenset(node.inputs),
        role=node.role,
        engine=role.engine if role else None,
        dtype=recipe.models[role.model].dtype if role else None,
        samplers=tuple(recipe.roles[each.role].engine for each in read if each.role),
        max_staleness=recipe.overlap.max_staleness,
    )
