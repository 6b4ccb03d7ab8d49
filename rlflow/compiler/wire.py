"""wire: build the graph of a recipe, in which every edge connects nodes of matching types."""

from collections.abc import Mapping
from typing import Any

import networkx as nx

import rlflow.nodes  # noqa: F401 (registers the kinds of nodes)
from rlflow.compiler.graph import SOURCES, Graph
from rlflow.errors import GraphError, below, did_you_mean
from rlflow.nodes.base import KINDS, GraphNode, Node, NodeView
from rlflow.plugins import load_object
from rlflow.recipe import Recipe
from rlflow.schema import parse


def wire(recipe: Recipe) -> Graph:
    """Build the graph of a recipe. Raises GraphError and RecipeError for what cannot be connected."""
    nodes = {name: _node(name, dict(entry), recipe) for name, entry in recipe.graph.items()}
    for node in nodes.values():
        _match_types(node, nodes)
    for node in tuple(nodes.values()):
        nodes |= node.operation.replacements(NodeView(node=node, nodes=nodes, recipe=recipe))
    return Graph(nodes=tuple(nodes[name] for name in _order(nodes)))


def _node(name: str, entry: dict[str, Any], recipe: Recipe) -> GraphNode:
    path = f"graph.{name}"
    if name in SOURCES:
        raise GraphError(path, f"'{name}' is an edge of the data and cannot be the name of a node", fix="another name")
    kind = _kind(entry.pop("node", None), path)
    role = _role(path, kind, entry.pop("role", None), recipe)
    named_inputs = {item.name: entry.pop(item.name) for item in kind.inputs() if item.name in entry}
    operation = parse(kind, entry, path)
    inputs = {}
    for item in kind.inputs():
        origin = named_inputs.get(item.name, item.name)
        if origin is None and not item.required:
            continue  # an optional input that the recipe sets to null
        origin = str(origin)
        if origin in recipe.graph or origin in SOURCES:
            inputs[item.name] = origin
        elif item.required or item.name in named_inputs:
            raise GraphError(
                f"{path}.{item.name}",
                f"no node '{origin}', which '{kind.kind}' reads",
                known=[*recipe.graph, *SOURCES],
                fix=did_you_mean(origin, recipe.graph) or f"add a node '{origin}', or name another: {item.name}: NODE",
            )
    return GraphNode(name=name, operation=operation, role=role, inputs=inputs)


def _role(path: str, kind: type[Node], role: Any, recipe: Recipe) -> str | None:
    """Return the role of a node, which is one of the recipe's where the node needs a model."""
    capability = kind.capability()
    if capability is None and role is not None:
        raise GraphError(f"{path}.role", f"'{kind.kind}' uses no model, but has the role '{role}'", fix="remove it")
    if capability is not None and (not isinstance(role, str) or role not in recipe.roles):
        missing = f"is missing: '{kind.kind}' needs a role whose engine can do {capability.__name__}"
        fix = did_you_mean(str(role), recipe.roles) or f"{path}.role=ROLE, one of these"
        raise GraphError(f"{path}.role", f"no role '{role}'" if role else missing, known=recipe.roles, fix=fix)
    return None if capability is None else str(role)


def _kind(name: Any, path: str) -> type[Node]:
    if isinstance(name, str) and ":" in name:
        kind = load_object(name, f"{path}.node")
        if not (isinstance(kind, type) and issubclass(kind, Node)):
            raise GraphError(f"{path}.node", f"'{name}' is not a Node", fix="derive it from rlflow.nodes.base.Node")
        with below(path):
            kind.inputs()  # reads the types of run
        return kind
    if not isinstance(name, str) or name not in KINDS:
        fact = "is missing" if name is None else f"no kind of node '{name}'"
        known = [*sorted(KINDS), "package.module:Class"]
        raise GraphError(f"{path}.node", fact, known=known, fix=did_you_mean(str(name), KINDS) or "one of these")
    return KINDS[name]


def _match_types(node: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    """Raise GraphError for an edge whose two ends have different types."""
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
        depth = {name: depth for depth, names in enumerate(nx.topological_generations(edges)) for name in names}
        return list(
            nx.lexicographical_topological_sort(edges, lambda name: (nodes[name].role is not None, depth[name], name))
        )
    except nx.NetworkXUnfeasible:
        cycle = [edge[0] for edge in nx.find_cycle(edges)]
        way = " -> ".join([*cycle, cycle[0]])
        fix = "let one of them read another node"
        raise GraphError(f"graph.{cycle[0]}", f"is part of a cycle: {way}", fix=fix) from None
