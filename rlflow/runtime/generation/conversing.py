"""Converse nodes as they run: with an exchange each, which lives where tokens are."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlflow.batch import Conversations
from rlflow.compiler.graph import Graph
from rlflow.nodes.environment_session import Exchange
from rlflow.nodes.generate import Converse
from rlflow.recipe import Model, Role
from rlflow.runtime.protocols import Engines


class Conversing:
    """Runs in the place of a converse node."""

    def __init__(self, node: Converse, exchange: Exchange) -> None:
        self._node, self._exchange = node, exchange

    def run(self, **inputs: Any) -> Conversations:
        return self._node.run(exchange=self._exchange, **inputs)

    def greedy(self) -> "Conversing":
        return Conversing(self._node.greedy(), self._exchange)


def conversing(graph: Graph, roles: Mapping[str, Role], models: Mapping[str, Model], engines: Engines) -> Graph:
    """The graph as it runs. Without a converse node it is the same."""
    nodes = []
    for node in graph.nodes:
        if isinstance(node.operation, Converse) and node.role is not None:
            name = roles[node.role].model
            operation: Any = Conversing(node.operation, engines.hosted(Exchange(node.operation, name, models[name])))
            nodes.append(replace(node, operation=operation))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
