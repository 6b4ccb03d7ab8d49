"""The evaluation of what learns from pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.compiler.graph import Graph, GraphNode, accuracy_node
from rlflow.data.source import DataSource
from rlflow.runtime.objects.budget import edge
from rlflow.runtime.protocols import Engines
from rlflow.runtime.step import run_node


@dataclass(frozen=True)
class PairEvaluator:
    """The graph's own nodes over held-out pairs, as far as the update that says how many it gets right."""

    before: tuple[GraphNode, ...]
    update: GraphNode

    def run(self, engines: Engines, data: DataSource) -> float:
        """The accuracy."""
        edges: dict[str, Any] = {"pairs": data.held_out_pairs()}
        with edge("evaluation"):
            for node in self.before:
                edges[node.name] = run_node(node, engines, edges)
            inputs: Mapping[str, Any] = {name: edges[origin] for name, origin in self.update.inputs.items()}
            operation: Any = self.update.operation
            return float(operation.accuracy(engines[str(self.update.role)], **inputs))


def pair_evaluator(graph: Graph) -> PairEvaluator | None:
    """Return the evaluation of a graph that reads pairs; None for one that generates its responses."""
    if graph.evaluation_metric == "reward" or (update := accuracy_node(graph)) is None:
        return None
    return PairEvaluator(graph.nodes[: graph.nodes.index(update)], update)
