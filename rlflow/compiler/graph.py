"""wire: from a recipe to its graph, with every edge and every role checked."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import networkx as nx

import rlflow.nodes  # noqa: F401 (makes the kinds of nodes known)
from rlflow.batch import Examples, Metrics, Pairs, Prompts, Selection
from rlflow.compiler.evaluation import check_evaluation, judged
from rlflow.compiler.lora import check_lora
from rlflow.engines.base import HEADS, capabilities_of
from rlflow.engines.registry import engine_kind, engine_names
from rlflow.errors import GraphError, RecipeError, below, did_you_mean
from rlflow.nodes.base import KINDS, Node
from rlflow.nodes.generate import Generate
from rlflow.nodes.policy_update import PolicyGradient
from rlflow.plugins import load_object
from rlflow.recipe import Recipe
from rlflow.schema import parse

SOURCES: Mapping[str, type] = {"prompts": Prompts, "examples": Examples, "pairs": Pairs}
"""Edges that come from the recipe's data."""


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    name: str
    operation: Node
    role: str | None
    inputs: Mapping[str, str]
    """From each connected parameter of ``run`` to the node, or the source, that gives it."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    nodes: tuple[GraphNode, ...]
    """In an order in which every node stands behind those it reads; equal recipes give equal orders."""

    @property
    def sources(self) -> frozenset[str]:
        return frozenset(origin for node in self.nodes for origin in node.inputs.values() if origin in SOURCES)

    @property
    def evaluated(self) -> Literal["accuracy", "reward"]:
        """What is measured on held-out rows."""
        return "accuracy" if "pairs" in self.sources else "reward"

    def trained_roles(self) -> list[str]:
        names = [node.role for node in self.nodes if node.role and "Trains" in _capabilities(node)]
        return list(dict.fromkeys(names))

    def reading_role(self) -> str:
        """The role whose model's tokenizer encodes what the data holds: the one that writes, or the first trained."""
        writing = [node.role for node in self.nodes if isinstance(node.operation, Generate) and node.role]
        return (writing or self.trained_roles())[0]

    def followers(self, generator: GraphNode) -> tuple[GraphNode, ...]:
        """The nodes that can work on parts of what this one generates: those that take each sample by itself, have no
        role, and read nothing but what is generated, or what others of their kind make of that."""
        if type(generator.operation) is not Generate or generator.operation.overcommit:
            return ()
        known, found = {generator.name}, []
        for node in self.nodes:
            is_single = isinstance(node.operation, Node) and node.operation.unit == "sample" and node.role is None
            if is_single and node.inputs and known.issuperset(node.inputs.values()):
                known.add(node.name)
                found.append(node)
        return tuple(found)

    def critic_warmup(self, role: str) -> int:
        """Steps in which the role is not trained yet."""
        operations = [node.operation for node in self.nodes if node.role == role]
        return max((each.critic_warmup for each in operations if isinstance(each, PolicyGradient)), default=0)

    def capabilities(self, role: str) -> frozenset[str]:
        """What the nodes ask of a role's engine."""
        return frozenset(name for node in self.nodes if node.role == role for name in _capabilities(node))


def wire(recipe: Recipe) -> Graph:
    """Raises GraphError, and RecipeError for options, with the recipe's path."""
    nodes = {name: _node(name, dict(entry), recipe) for name, entry in recipe.graph.items()}
    for node in nodes.values():
        _check_edges(node, nodes)
        with below(f"graph.{node.name}"):
            node.operation.check(frozenset(node.inputs))
    graph = Graph(nodes=tuple(nodes[name] for name in _order(nodes)))
    _check_outputs_read(recipe, graph)
    check_evaluation(recipe, graph)
    _check_heads(graph)
    _check_roles(recipe, graph)
    _check_overcommit(recipe, graph)
    return graph


def _node(name: str, entry: dict[str, Any], recipe: Recipe) -> GraphNode:
    path = f"graph.{name}"
    if name in SOURCES:
        raise GraphError(path, f"'{name}' is what the data gives, and cannot be a node", fix="another name")
    kind = _kind(entry.pop("node", None), path)
    role = entry.pop("role", None)
    capability = kind.capability()
    if capability is None and role is not None:
        raise GraphError(f"{path}.role", f"'{kind.kind}' asks nothing of a model, but has the role '{role}'")
    if capability is not None and (not isinstance(role, str) or role not in recipe.roles):
        fact = (
            f"no role '{role}'" if role else f"is missing: '{kind.kind}' asks a role's engine for {capability.__name__}"
        )
        fix = did_you_mean(str(role), recipe.roles) if role else None
        raise GraphError(f"{path}.role", fact, known=recipe.roles, fix=fix)
    given = {item.name: entry.pop(item.name) for item in kind.inputs() if item.name in entry}
    operation = parse(kind, entry, path)
    inputs = {}
    for item in kind.inputs():
        origin = given.get(item.name, item.name)
        if origin is None and not item.required:
            continue  # an optional input that is left open on purpose
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
        raise GraphError(
            f"{path}.node", fact, known=[*sorted(KINDS), "package.module:Class"], fix=did_you_mean(str(name), KINDS)
        )
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
        raise GraphError(f"graph.{cycle[0]}", f"goes in a circle: {way}", fix="let one read another node") from None


def _check_outputs_read(recipe: Recipe, graph: Graph) -> None:
    read = {origin for node in graph.nodes for origin in node.inputs.values()}
    if recipe.evaluation is not None and (figure := judged(graph)):
        read.add(figure[1].name)
    for node in graph.nodes:
        if node.name not in read and node.operation.output() not in (Metrics, Selection):
            raise GraphError(
                f"graph.{node.name}",
                f"nobody reads its {node.operation.output().__name__}",
                fix="remove the node, or name it as an input of another",
            )


def _check_roles(recipe: Recipe, graph: Graph) -> None:
    trained = graph.trained_roles()
    if not trained:
        raise GraphError("graph", "no node trains a role", fix="add one, as update: {node: policy_update, role: actor}")
    for name, role in recipe.roles.items():
        path = f"roles.{name}"
        _check_name(f"{path}.model", "model", role.model, recipe.models)
        _check_name(f"{path}.engine", "engine", role.engine, engine_names())
        for other in () if isinstance(role.colocate, str) else role.colocate:
            _check_name(f"{path}.colocate", "role", other, recipe.roles)
        nodes = [node for node in graph.nodes if node.role == name]
        if not nodes:
            raise GraphError(path, "no node uses this role", fix=f"remove it, or give a node role: {name}")
        for node in nodes:
            _check_capability(path, role.engine, node)
            if isinstance(node.operation, PolicyGradient) and (warmup := node.operation.critic_warmup) >= recipe.steps:
                fact = f"{warmup} leaves none of the {recipe.steps} steps to train '{name}' in"
                raise RecipeError(f"graph.{node.name}.critic_warmup", fact, fix="fewer, or more steps")
        if role.optimizer is not None and name not in trained:
            raise GraphError(f"{path}.optimizer", f"'{name}' is never trained", fix="remove it")
        check_lora(path, role, name in trained, graph.capabilities(name), recipe.models[role.model].architecture)
        if role.follows is not None:
            _check_follows(recipe, name, role.follows, trained)


def _check_heads(graph: Graph) -> None:
    """A role has one."""
    heads: dict[str, tuple[str, str]] = {}
    for node in graph.nodes:
        if node.role is None:
            continue
        asked = next((head for capability, head in HEADS.items() if capability in _capabilities(node)), "vocabulary")
        other, head = heads.setdefault(node.role, (node.name, asked))
        if head != asked:
            fact = f"'{node.role}' has a {head} head, for graph.{other}, and no {asked} head"
            raise GraphError(f"graph.{node.name}.role", fact, fix="two roles")


def _check_overcommit(recipe: Recipe, graph: Graph) -> None:
    reading = [node.name for node in graph.nodes if "prompts" in node.inputs.values()]
    for node in graph.nodes:
        if not isinstance(node.operation, Generate) or not node.operation.overcommit or node.role is None:
            continue
        path, share, size = f"graph.{node.name}.overcommit", node.operation.overcommit, recipe.data.batch_size
        if not node.operation.begun_ahead(size):
            fact = f"{share:g} of {size} prompts (data.batch_size) is less than one"
            least = ceil(1e4 / size) / 1e4
            raise RecipeError(path, fact, fix=f"{path}={least:g}, or 0" if size > 1 else f"{path}=0")
        if reading != [node.name]:
            fact = f"prompts are begun before their step, and these nodes read those of a step: {', '.join(reading)}"
            raise GraphError(path, fact, fix=f"{path}=0")
        if not engine_kind(recipe.roles[node.role].engine).can_resume:
            raise RecipeError(
                path,
                f"engine '{recipe.roles[node.role].engine}' of role '{node.role}' writes all of a response at once",
                known=[name for name in engine_names() if engine_kind(name).can_resume],
                fix=f"one of those known, or {path}=0",
            )


def _check_name(path: str, what: str, name: str, known: Iterable[str]) -> None:
    if name not in (names := list(known)):
        raise RecipeError(path, f"no {what} '{name}'", known=names, fix=did_you_mean(name, names))


def _check_capability(path: str, engine: str, node: GraphNode) -> None:
    can, asked = engine_kind(engine).capabilities, _capabilities(node)
    if not asked <= can:
        raise GraphError(
            f"{path}.engine",
            f"'{engine}' cannot do what graph.{node.name} asks, {' and '.join(sorted(asked))}; "
            f"it can {', '.join(sorted(can))}",
            known=[name for name in engine_names() if asked <= engine_kind(name).capabilities],
            fix="one of those known",
        )


def _check_follows(recipe: Recipe, name: str, leader: str, trained: list[str]) -> None:
    path = f"roles.{name}"
    if leader not in trained:
        fact = f"'{leader}' is never trained" if leader in recipe.roles else f"no role '{leader}'"
        raise GraphError(f"{path}.follows", fact, known=trained, fix=did_you_mean(leader, trained) or "a trained role")
    if recipe.roles[leader].model != recipe.roles[name].model:
        models = f"'{recipe.roles[name].model}', '{leader}' has '{recipe.roles[leader].model}'"
        raise GraphError(f"{path}.follows", f"its model is {models}", fix="the same model for both")
    if "Follows" not in engine_kind(recipe.roles[name].engine).capabilities:
        raise GraphError(f"{path}.follows", f"engine '{recipe.roles[name].engine}' cannot take weights over")


def _capabilities(node: GraphNode) -> frozenset[str]:
    capability = node.operation.capability()
    return capabilities_of(capability) if capability else frozenset()
