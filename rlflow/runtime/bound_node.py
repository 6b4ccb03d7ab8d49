"""Nodes together with the objects that they keep during a run: a state, a session, or both."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.compiler.graph import Graph, GraphNode
from rlflow.nodes.base import Node, State
from rlflow.recipe import Model, Role
from rlflow.runtime.protocols import Engines


class BoundNode:
    """A node with its state and its session, which runs in the node's place. Checkpoints save the state."""

    def __init__(self, node: Node, state: State | None, session: Any) -> None:
        self.node = node
        self.reads_tokens = node.reads_tokens
        self._state, self._session = state, session

    def run(self, **inputs: Any) -> Any:
        """Run the node on its inputs."""
        return self._run(self._state, inputs)

    def run_in_evaluation(self, **inputs: Any) -> Any:
        """Run the node on its inputs, and leave its state as it is."""
        return self._run(copy.deepcopy(self._state), inputs)

    def greedy(self) -> "BoundNode":
        """Return a node that generates, as evaluation runs it."""
        node: Any = self.node
        return BoundNode(node.greedy(), self._state, self._session)

    def state_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the state."""
        return {} if self._state is None else self._state.metrics()

    def save(self, folder: Path) -> None:
        """Write the state to ``folder``, a file for each of its entries."""
        assert self._state is not None
        for name, value in self._state.state_dict().items():
            (folder / f"{name}.json").write_text(json.dumps(value))

    def restore(self, folder: Path) -> None:
        """Read the state from ``folder``."""
        assert self._state is not None
        self._state.load_state_dict({path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")})

    @property
    def has_state(self) -> bool:
        """Return whether there is a state to save."""
        return self._state is not None

    def _run(self, state: State | None, inputs: Mapping[str, Any]) -> Any:
        objects = {"state": state, "session": self._session}
        operation: Any = self.node
        return operation.run(**inputs, **{name: each for name, each in objects.items() if each is not None})


def bind_nodes(graph: Graph, roles: Mapping[str, Role], models: Mapping[str, Model], engines: Engines) -> Graph:
    """Return the graph as it runs: nodes with a state or a session are bound to them."""
    return replace(graph, nodes=tuple(_bind(node, roles, models, engines) for node in graph.nodes))


def _bind(node: GraphNode, roles: Mapping[str, Role], models: Mapping[str, Model], engines: Engines) -> GraphNode:
    state, session = node.operation.new_state(), None
    if "session" in node.operation.from_runtime() and node.role is not None:
        name = roles[node.role].model
        session = engines.place_with_tokens(node.operation.open_session(name, models[name]))
    if state is None and session is None:
        return node
    operation: Any = BoundNode(node.operation, state, session)
    return replace(node, operation=operation)


def states_of(graph: Graph, engines: Engines) -> Mapping[str, Any]:
    """Return the bound nodes that have a state, by their path in the recipe, wherever they run."""
    return {
        f"graph.{node.name}": operation_of(node, engines)
        for node in graph.nodes
        if isinstance(node.operation, BoundNode) and node.operation.has_state
    }


def operation_of(node: GraphNode, engines: Engines) -> Any:
    """Return what runs a node. A node without a role that reads tokens runs in a process where tokens are."""
    operation = node.operation
    return engines.place_with_tokens(operation) if node.role is None and operation.reads_tokens else operation
