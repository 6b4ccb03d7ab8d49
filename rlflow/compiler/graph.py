"""The graph of a recipe: its nodes in the order in which they run, and questions that other modules ask about it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rlflow.batch import Examples, Pairs, Prompts, Rewards
from rlflow.nodes.base import GraphNode

SOURCES: Mapping[str, type] = {"prompts": Prompts, "examples": Examples, "pairs": Pairs}
"""The edges that come from the recipe's data."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The nodes of a recipe. Equal recipes give equal graphs."""

    nodes: tuple[GraphNode, ...]
    """In topological order: every node comes after the nodes that it reads."""

    @property
    def sources(self) -> frozenset[str]:
        """Return the names of the data edges that some node reads."""
        return frozenset(origin for node in self.nodes for origin in node.inputs.values() if origin in SOURCES)

    @property
    def evaluation_metric(self) -> Literal["accuracy", "reward"]:
        """Return the figure that is measured on held-out rows."""
        return "accuracy" if "pairs" in self.sources else "reward"

    def trained_roles(self) -> list[str]:
        """Return the roles that some node trains, in the order of the nodes."""
        names = [node.role for node in self.nodes if node.role and "Trains" in node.capabilities]
        return list(dict.fromkeys(names))

    def tokenizer_role(self) -> str:
        """Return the role whose tokenizer encodes the data: the one that generates, or the first trained role."""
        generating = [node.role for node in self.nodes if node.operation.sampling and node.role]
        return (generating or self.trained_roles())[0]

    def streaming_consumers(self, generator: GraphNode) -> tuple[GraphNode, ...]:
        """Return the nodes that work on single samples or groups and can start before ``generator`` ends.

        They read nothing except the generated samples or the output of other such nodes.
        """
        if not generator.operation.can_stream:
            return ()
        available, consumers = {generator.name}, []
        for node in self.nodes:
            if node.works_on_parts and available.issuperset(node.inputs.values()):
                available.add(node.name)
                consumers.append(node)
        return tuple(consumers)

    def ahead_nodes(self) -> tuple[GraphNode, ...]:
        """Return the nodes that can run before their step: those that generate, and those that work on parts of it."""
        early: dict[str, GraphNode] = {}
        for node in self.nodes:
            generates = node.operation.sampling is not None and SOURCES.keys() >= set(node.inputs.values())
            if generates or (node.works_on_parts and early.keys() >= set(node.inputs.values())):
                early[node.name] = node
        return tuple(early.values())

    def without(self, nodes: Collection[GraphNode]) -> "Graph":
        """Return the graph of all other nodes."""
        names = {node.name for node in nodes}
        return Graph(nodes=tuple(node for node in self.nodes if node.name not in names))

    def critic_warmup(self, role: str) -> int:
        """Return the number of first steps in which the role is not trained yet."""
        return max((node.operation.warmup_steps for node in self.nodes if node.role == role), default=0)

    def capabilities(self, role: str) -> frozenset[str]:
        """Return the capabilities that the nodes ask of a role's engine."""
        return frozenset(name for node in self.nodes if node.role == role for name in node.capabilities)


def resampled_nodes(graph: Graph) -> tuple[GraphNode, ...]:
    """Return the dynamic_sampling node and all nodes that it depends on, in order.

    A step runs them several times, until it has enough prompts. A graph without such a node has none.
    """
    names = {node.name for node in graph.nodes if node.selects_prompts}
    for node in reversed(graph.nodes):
        if node.name in names:
            names.update(node.inputs.values())
    return tuple(node for node in graph.nodes if node.name in names)


def evaluation_nodes(graph: Graph) -> tuple[GraphNode, GraphNode] | None:
    """Return a node that generates and the node whose rewards for its responses are measured on held-out rows.

    The second node reads nothing except the responses. A reward function is preferred to a reward model.
    """
    generators = {node.name: node for node in graph.nodes if node.operation.sampling}
    rewarding = [node for node in graph.nodes if issubclass(node.operation.output(), Rewards)]
    for node in sorted(rewarding, key=lambda node: node.role is not None):
        origins = set(node.inputs.values())
        if len(origins) == 1 and origins <= generators.keys():
            return generators[origins.pop()], node
    return None


def accuracy_node(graph: Graph) -> GraphNode | None:
    """Return the first node that trains on pairs and has a method ``accuracy``, the share of pairs it gets right."""
    trains = (node for node in graph.nodes if "pairs" in node.inputs.values() and node.role in graph.trained_roles())
    return next((node for node in trains if callable(getattr(node.operation, "accuracy", None))), None)
