"""Whether responses come in the groups, and the pairs, that nodes compare them in.

Whether what is asked for rewards is a reward model, as far as that can be known before anything runs.

What a step does in rounds: a dynamic_sampling node and all that it is made of.

Warnings about the options of a recipe's nodes, shown before the run.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from rlflow.compiler.graph import SOURCES, Graph, GraphNode, wire
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.advantages import BatchAdvantage, GreedyAdvantage
from rlflow.nodes.base import Setting
from rlflow.nodes.dynamic_sampling import DynamicSampling
from rlflow.nodes.generate import Generate
from rlflow.recipe import Model, Recipe


def check_groups(graph: Graph) -> None:
    """Raises GraphError where responses are compared with others to their prompt and there are none, for a greedy
    baseline that is not greedy, and for rows that are to be pairs and something else."""
    _check_pairs(graph)
    writing = {node.name: node.operation for node in graph.nodes if isinstance(node.operation, Generate)}
    for node in graph.nodes:
        read = [origin for origin in node.inputs.values() if origin in writing]
        compares = node.operation.unit == "group" or isinstance(node.operation, BatchAdvantage)
        if compares and read and all(writing[origin].group_size == 1 for origin in read):
            origin = read[0]
            fact = f"is 1, and graph.{node.name} compares the responses to a prompt with each other"
            raise GraphError(f"graph.{origin}.group_size", fact, fix="2 or more")
        if isinstance(node.operation, GreedyAdvantage):
            _check_greedy(node.name, node.inputs["greedy"], writing.get(node.inputs["greedy"]))


def _check_pairs(graph: Graph) -> None:
    others = sorted(graph.sources - {"pairs"})
    if "pairs" in graph.sources and others:
        reading = next(node for node in graph.nodes if others[0] in node.inputs.values())
        fact = f"it reads {others[0]}, and other nodes read pairs: a run's rows are one or the other"
        raise GraphError(f"graph.{reading.name}", fact, fix="two recipes, the second with models.NAME.recipe the first")


def _check_greedy(name: str, origin: str, writes: Generate | None) -> None:
    for option, value in {"temperature": 0, "group_size": 1}.items():
        if writes is not None and getattr(writes, option) != value:
            fact = f"is {getattr(writes, option)}, and graph.{name} takes the likeliest response as its baseline"
            raise GraphError(f"graph.{origin}.{option}", fact, fix=f"graph.{origin}.{option}={value}")


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


def in_rounds(graph: Graph) -> tuple[GraphNode, ...]:
    """In their order, that node the last. None of a graph without one."""
    wanted = {node.name for node in graph.nodes if isinstance(node.operation, DynamicSampling)}
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted.update(node.inputs.values())
    return tuple(node for node in graph.nodes if node.name in wanted)


def after_rounds(graph: Graph) -> Graph:
    """The other nodes."""
    names = {node.name for node in in_rounds(graph)}
    return Graph(nodes=tuple(node for node in graph.nodes if node.name not in names))


def check_rounds(recipe: Recipe, graph: Graph) -> None:
    """Raises GraphError for what cannot be done in rounds, RecipeError where some are expected and there are none."""
    sampling = [node.name for node in graph.nodes if isinstance(node.operation, DynamicSampling)]
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
                raise GraphError(f"graph.{node.name}", f"it reads all {source} of a step, and {path} chooses prompts")
        if node in in_rounds(graph) and getattr(node.operation, "kl_target", None) is not None:
            fact = f"a coefficient is the same for all of a step, and {path} makes this node run several times in one"
            raise GraphError(f"graph.{node.name}.kl_target", fact, fix=f"graph.{node.name}.kl_target=null")
        if isinstance(node.operation, Generate) and node.operation.overcommit:
            fact = f"prompts are begun before their step, and {path} chooses them in it"
            raise GraphError(f"graph.{node.name}.overcommit", fact, fix=f"graph.{node.name}.overcommit=0")


def cautions(recipe: Recipe, graph: Graph) -> Iterator[str]:
    """Yield a line for each: what the nodes say of themselves, and what the step's rounds are planned for."""
    for node in graph.nodes:
        for line in node.operation.cautions(_setting(recipe, graph, node)):
            yield f"graph.{node.name}.{line}"
    if rounds := in_rounds(graph):
        yield (
            f"graph.{rounds[-1].name}: responses are planned for {recipe.expect.rounds:g} x the prompts that are "
            "trained on (expect.rounds)"
        )


def _setting(recipe: Recipe, graph: Graph, node: GraphNode) -> Setting:
    role = recipe.roles[node.role] if node.role else None
    read = [each for each in graph.nodes if each.name in node.inputs.values() and isinstance(each.operation, Generate)]
    return Setting(
        connected=frozenset(node.inputs),
        role=node.role,
        engine=role.engine if role else None,
        dtype=recipe.models[role.model].dtype if role else None,
        samplers=tuple(recipe.roles[each.role].engine for each in read if each.role),
    )
