"""Nodes together with the state that they keep during a run."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.compiler.graph import Graph, GraphNode
from rlflow.nodes.base import Node, State
from rlflow.runtime.protocols import Engines


class BoundNode:
    """A node with its state, which runs in the node's place. Checkpoints save the state."""

    def __init__(self, node: Node, state: State) -> None:
        self.node = node
        self.reads_tokens = node.reads_tokens
        self._state = state

    def run(self, **inputs: Any) -> Any:
        """Run the node on its inputs."""
        return self._run(self._state, inputs)

    def run_in_evaluation(self, **inputs: Any) -> Any:
        """Run the node on its inputs, and leave its state as it is."""
        return self._run(copy.deepcopy(self._state), inputs)

    def for_evaluation(self, num_responses: int, temperature: float | None, top_p: float | None) -> "BoundNode":
        """Return a node that generates, as evaluation runs it."""
        node: Any = self.node
        return BoundNode(node.for_evaluation(num_responses, temperature, top_p), self._state)

    def state_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the state."""
        return self._state.metrics()

    def save(self, folder: Path) -> None:
        """Write the state to ``folder``, a file for each of its entries."""
        for name, value in self._state.state_dict().items():
            (folder / f"{name}.json").write_text(json.dumps(value))

    def restore(self, folder: Path) -> None:
        """Read the state from ``folder``."""
        self._state.load_state_dict({path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")})

    def _run(self, state: State, inputs: Mapping[str, Any]) -> Any:
        operation: Any = self.node
        return operation.run(**inputs, state=state)


def bind_nodes(graph: Graph) -> Graph:
    """Return the graph as it runs: nodes with a state are bound to it."""
    return replace(graph, nodes=tuple(_bind(node) for node in graph.nodes))


def _bind(node: GraphNode) -> GraphNode:
    state = node.operation.new_state()
    if state is None:
        return node
    operation: Any = BoundNode(node.operation, state)
    return replace(node, operation=operation)


def states_of(graph: Graph, engines: Engines) -> Mapping[str, Any]:
    """Return the bound nodes that have a state, by their path in the recipe, wherever they run."""
    return {
        f"graph.{node.name}": operation_of(node, engines)
        for node in graph.nodes
        if isinstance(node.operation, BoundNode)
    }


def operation_of(node: GraphNode, engines: Engines) -> Any:
    """Return what runs a node. A node without a role that reads tokens runs in processes where tokens are."""
    operation = node.operation
    if node.runs_on_every_host:
        return engines.place_with_samples(operation)
    return engines.place_with_tokens(operation) if node.role is None and operation.reads_tokens else operation
