"""The states that nodes keep during a run. They stand beside the graph, by the names of their nodes."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.nodes.base import Node, State


class NodeState:
    """The state of a node during a run, which lives where the node runs. Checkpoints save it."""

    def __init__(self, state: State) -> None:
        self._state = state

    def run(self, node: Node, /, **inputs: Any) -> Any:
        """Run the node on its inputs."""
        return _run(node, self._state, inputs)

    def run_in_evaluation(self, node: Node, /, **inputs: Any) -> Any:
        """Run the node on its inputs, and leave the state as it is."""
        return _run(node, copy.deepcopy(self._state), inputs)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the state."""
        return dict(self._state.metrics())

    def save(self, folder: Path) -> None:
        """Write the state to ``folder``, a file for each of its entries."""
        for name, value in self._state.state_dict().items():
            (folder / f"{name}.json").write_text(json.dumps(value))

    def restore(self, folder: Path) -> None:
        """Read the state from ``folder``."""
        self._state.load_state_dict({path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")})


def _run(node: Any, state: State, inputs: Mapping[str, Any]) -> Any:
    return node.run(**inputs, state=state)
