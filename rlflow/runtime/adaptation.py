"""KL coefficients that follow from the steps so far."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.compiler.graph import Graph
from rlflow.nodes.gae import GaeAdvantage
from rlflow.nodes.kl import adapted
from rlflow.nodes.policy_update import PolicyGradient
from rlflow.nodes.reward_shaping import KlPenalty
from rlflow.runtime.protocols import Engines

_STATE = "kl_coef.json"
_ADAPTING = (PolicyGradient, KlPenalty, GaeAdvantage)


class AdaptiveKl:
    """Runs in the place of a node with a ``kl_target``. It is saved and restored as trained engines are."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.reads_tokens: bool = node.reads_tokens

    def run(self, **inputs: Any) -> Any:
        """After it the node has the coefficient of the next step."""
        node = self._node
        output = node.run(**inputs)
        if (kl := node.measured_kl(output, inputs)) is not None:
            self._set(adapted(node.kl_coef, kl, node.kl_target))
        return output

    def coefficient(self) -> float:
        """In force in the next step."""
        return float(self._node.kl_coef)

    def save(self, folder: Path) -> None:
        (folder / _STATE).write_text(json.dumps(self._node.kl_coef))

    def restore(self, folder: Path) -> None:
        self._set(json.loads((folder / _STATE).read_text()))

    def _set(self, coefficient: float) -> None:
        self._node = replace(self._node, kl_coef=coefficient)


def adaptive(graph: Graph, engines: Engines) -> tuple[Graph, Mapping[str, AdaptiveKl]]:
    """The graph for training, and by their paths what is to be saved of it. Without a ``kl_target`` it is the same."""
    adapting: dict[str, AdaptiveKl] = {}
    nodes = []
    for node in graph.nodes:
        if isinstance(node.operation, _ADAPTING) and node.operation.kl_target is not None:
            operation: Any = AdaptiveKl(node.operation)
            # What reads tokens runs where they are, and its coefficient is there.
            adapting[f"graph.{node.name}"] = engines.hosted(operation) if operation.reads_tokens else operation
            nodes.append(replace(node, operation=operation))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes)), adapting
