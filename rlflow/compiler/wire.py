"""wire: build the graph of a recipe, and check every edge, role and engine in it."""

from collections.abc import Mapping
from typing import Any

import networkx as nx

import rlflow.nodes  # noqa: F401 (registers the kinds of nodes)
from rlflow.batch import Metrics, Selection
from rlflow.compiler.graph import SOURCES, Graph, GraphNode, accuracy_node, evaluation_nodes
from rlflow.compiler.role_checks import check_roles
from rlflow.engines.base import choose_head
from rlflow.errors import GraphError, RecipeError, below, did_you_mean
from rlflow.extras import check_trackers
from rlflow.nodes.base import KINDS, Node
from rlflow.nodes.generate import Generate
from rlflow.plugins import check_module, load_object
from rlflow.recipe import Recipe
from rlflow.recipe.evaluation import Evaluation
from rlflow.schema import parse

_NO_RESPONSES = "pairs are given, and no responses are generated"


def wire(recipe: Recipe) -> Graph:
    """Build the graph and check it. Raises GraphError, and RecipeError for options, with the path in the recipe."""
    nodes = {name: _node(name, dict(entry), recipe) for name, entry in recipe.graph.items()}
    for node in nodes.values():
        _check_edges(node, nodes)
        with below(f"graph.{node.name}"):
            node.operation.check(frozenset(node.inputs))
    graph = Graph(nodes=tuple(nodes[name] for name in _order(nodes)))
    if ":" in recipe.data.source:
        check_module(recipe.data.source, "data.source")
    for name, each in recipe.evaluation.sets.items() if recipe.evaluation else ():
        if each.source and ":" in each.source:
            check_module(each.source, f"evaluation.sets.{name}.source")
    check_trackers(recipe.trackers)
    _check_outputs_read(recipe, graph)
    _check_evaluation(recipe, graph)
    _check_heads(graph)
    check_roles(recipe, graph)
    return graph


def _node(name: str, entry: dict[str, Any], recipe: Recipe) -> GraphNode:
    path = f"graph.{name}"
    if name in SOURCES:
        raise GraphError(path, f"'{name}' is an edge of the data and cannot be the name of a node", fix="another name")
    kind = _kind(entry.pop("node", None), path)
    role = entry.pop("role", None)
    _check_role(path, kind, role, recipe)
    given = {item.name: entry.pop(item.name) for item in kind.inputs() if item.name in entry}
    operation = parse(kind, entry, path)
    inputs = {}
    for item in kind.inputs():
        origin = given.get(item.name, item.name)
        if origin is None and not item.required:
            continue  # an optional input that the recipe sets to null
        origin = str(origin)
        if origin in recipe.graph or origin in SOURCES:
            inputs[item.name] = origin
        elif item.required or item.name in given:
            raise GraphError(
                f"{path}.{item.name}",
                f"no node '{origin}', which '{kind.kind}' reads",
                known=[*recipe.graph, *SOURCES],
                fix=did_you_mean(origin, recipe.graph) or f"add a node '{origin}', or name another: {item.name}: NODE",
            )
    return GraphNode(name=name, operation=operation, role=role, inputs=inputs)


def _check_role(path: str, kind: type[Node], role: Any, recipe: Recipe) -> None:
    capability = kind.capability()
    if capability is None and role is not None:
        raise GraphError(f"{path}.role", f"'{kind.kind}' uses no model, but has the role '{role}'", fix="remove it")
    if capability is not None and (not isinstance(role, str) or role not in recipe.roles):
        missing = f"is missing: '{kind.kind}' needs a role whose engine can do {capability.__name__}"
        fix = did_you_mean(str(role), recipe.roles) or f"{path}.role=ROLE, one of these"
        raise GraphError(f"{path}.role", f"no role '{role}'" if role else missing, known=recipe.roles, fix=fix)


def _kind(name: Any, path: str) -> type[Node]:
    if isinstance(name, str) and ":" in name:
        kind = load_object(name, f"{path}.node")
        if not (isinstance(kind, type) and issubclass(kind, Node)):
            raise GraphError(f"{path}.node", f"'{name}' is not a Node", fix="derive it from rlflow.nodes.base.Node")
        with below(path):
            kind.check_signature()
        return kind
    if not isinstance(name, str) or name not in KINDS:
        fact = "is missing" if name is None else f"no kind of node '{name}'"
        known = [*sorted(KINDS), "package.module:Class"]
        raise GraphError(f"{path}.node", fact, known=known, fix=did_you_mean(str(name), KINDS) or "one of these")
    return KINDS[name]


def _check_edges(node: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    types = {item.name: item.type for item in node.operation.inputs()}
    for name, origin in node.inputs.items():
        output = SOURCES[origin] if origin in SOURCES else nodes[origin].operation.output()
        if not issubclass(output, types[name]):
            raise GraphError(
                f"graph.{node.name}.{name}",
                f"'{origin}' gives {output.__name__}, '{node.operation.kind}' reads {types[name].__name__}",
                known=[n.name for n in nodes.values() if issubclass(n.operation.output(), types[name])],
                fix=f"name a node that gives {types[name].__name__}",
            )


def _order(nodes: Mapping[str, GraphNode]) -> list[str]:
    edges: nx.DiGraph[str] = nx.DiGraph()
    edges.add_nodes_from(nodes)
    edges.add_edges_from((o, node.name) for node in nodes.values() for o in node.inputs.values() if o in nodes)
    try:
        return list(nx.lexicographical_topological_sort(edges))
    except nx.NetworkXUnfeasible:
        cycle = [edge[0] for edge in nx.find_cycle(edges)]
        way = " -> ".join([*cycle, cycle[0]])
        fix = "let one of them read another node"
        raise GraphError(f"graph.{cycle[0]}", f"is part of a cycle: {way}", fix=fix) from None


def _check_outputs_read(recipe: Recipe, graph: Graph) -> None:
    read = {origin for node in graph.nodes for origin in node.inputs.values()}
    if recipe.evaluation is not None and (pair := evaluation_nodes(graph)):
        read.add(pair[1].name)
    for node in graph.nodes:
        if node.name not in read and node.operation.output() not in (Metrics, Selection):
            raise GraphError(
                f"graph.{node.name}",
                f"no node reads its {node.operation.output().__name__}",
                fix="remove the node, or name it as an input of another",
            )


def _check_evaluation(recipe: Recipe, graph: Graph) -> None:
    if recipe.evaluation is None:
        return
    if graph.evaluation_metric == "reward" and evaluation_nodes(graph) is None:
        fact = "needs a node that generates, and a node that gives Rewards and reads its responses alone"
        raise GraphError("evaluation", fact, fix="add rewards: {node: reward}, or evaluation=null")
    if graph.evaluation_metric == "accuracy" and accuracy_node(graph) is None:
        fact = "no node that trains on pairs has a method 'accuracy', the share of pairs that it gets right"
        raise GraphError(
            "evaluation", fact, fix="derive it from rlflow.nodes.preference.Preference, or evaluation=null"
        )
    if not recipe.evaluation.sets_with(recipe.data.eval_split):
        raise RecipeError(
            "data.eval_split", "is missing, and evaluation needs it", fix="name a split, or evaluation=null"
        )
    _check_responses(recipe.evaluation, graph)


def _check_responses(options: Evaluation, graph: Graph) -> None:
    """Check that several responses to a prompt are generated where any are, and sampled."""
    counts = {"evaluation": options.num_responses}
    counts |= {f"evaluation.sets.{name}": options.responses_of(each) for name, each in options.sets.items()}
    several = [path for path, count in counts.items() if count > 1]
    sampled = {"temperature": options.temperature, "top_p": options.top_p}
    given = [name for name, value in sampled.items() if value is not None]
    given += ["pass_reward"] * (options.pass_reward != Evaluation.pass_reward)
    if given and not several:
        if graph.evaluation_metric == "accuracy":
            raise RecipeError(f"evaluation.{given[0]}", _NO_RESPONSES, fix="leave it out")
        fact = "a single response has the likeliest tokens, whatever the temperature"
        if given[0] == "pass_reward":
            fact = "decides about pass@k, which is not measured with a single response"
        raise RecipeError(f"evaluation.{given[0]}", fact, fix="evaluation.num_responses=8, or leave it out")
    if not several:
        return
    path = f"{several[0]}.num_responses"
    if graph.evaluation_metric == "accuracy":
        raise RecipeError(path, _NO_RESPONSES, fix="leave it out")
    generator, _ = evaluation_nodes(graph) or (None, None)
    operation = generator.operation if generator else None
    if options.temperature is None and isinstance(operation, Generate) and not operation.temperature:
        fact = "all responses to a prompt would be the same at temperature 0, that of training"
        raise RecipeError(path, fact, fix="evaluation.temperature=1")


def _check_heads(graph: Graph) -> None:
    """Check that the nodes of each role ask for the same output head."""
    heads: dict[str, tuple[str, str]] = {}
    for node in graph.nodes:
        if node.role is None:
            continue
        needed = choose_head(node.capabilities)
        other, head = heads.setdefault(node.role, (node.name, needed))
        if head != needed:
            fact = f"graph.{other} needs '{node.role}' to have a {head} head, and this node needs a {needed} head"
            raise GraphError(f"graph.{node.name}.role", fact, fix="two roles")
