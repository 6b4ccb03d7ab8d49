"""The evaluation of what learns from pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.compiler.graph import Graph, GraphNode
from rlflow.data.source import DataSource
from rlflow.nodes.preference import Preference
from rlflow.runtime.base import Engines
from rlflow.runtime.data_plane.budget import edge
from rlflow.runtime.step import run_node


@dataclass(frozen=True)
class PairEvaluator:
    """The graph's own nodes over held-out pairs, as far as its update, which says how often it would be right."""

    before: tuple[GraphNode, ...]
    update: GraphNode

    def run(self, engines: Engines, data: DataSource) -> float:
        """The accuracy."""
        edges: dict[str, Any] = {"pairs": data.held_out_pairs()}
        with edge("evaluation"):
            for node in self.before:
                edges[node.name] = run_node(node, engines, edges)
            inputs: Mapping[str, Any] = {name: edges[origin] for name, origin in self.update.inputs.items()}
            operation, role = self.update.operation, self.update.role
            assert isinstance(operation, Preference)
            assert role is not None
            return operation.accuracy(engines[role], **inputs)


def pair_evaluator(graph: Graph) -> PairEvaluator | None:
    """Of a graph that has a node which trains on pairs; the first of them."""
    places = (at for at, node in enumerate(graph.nodes) if isinstance(node.operation, Preference))
    if (at := next(places, None)) is None:
        return None
    return PairEvaluator(graph.nodes[:at], graph.nodes[at])
