"""KL coefficients that follow from the steps so far."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.batch import Metrics
from rlflow.compiler.graph import Graph
from rlflow.nodes.kl import adapted
from rlflow.nodes.policy_gradient import PolicyGradient

_STATE = "kl_coef.json"


class AdaptiveKl:
    """Runs in the place of an update with a ``kl_target``. It is saved and restored as trained engines are."""

    def __init__(self, update: PolicyGradient) -> None:
        self._update = update

    def run(self, **inputs: Any) -> Metrics:
        """With the coefficient that it had as a metric; the next step has another one."""
        metrics, coefficient, target = self._update.run(**inputs), self._update.kl_coef, self._update.kl_target
        assert target is not None
        self._update = replace(self._update, kl_coef=adapted(coefficient, metrics.values["kl"], target))
        return Metrics(values={**metrics.values, "kl_coef": coefficient})

    def save(self, folder: Path) -> None:
        (folder / _STATE).write_text(json.dumps(self._update.kl_coef))

    def restore(self, folder: Path) -> None:
        self._update = replace(self._update, kl_coef=json.loads((folder / _STATE).read_text()))


def adaptive(graph: Graph) -> tuple[Graph, Mapping[str, AdaptiveKl]]:
    """The graph for training, and by their paths what is to be saved of it. Without a ``kl_target`` it is the same."""
    updates: dict[str, AdaptiveKl] = {}
    nodes = []
    for node in graph.nodes:
        if isinstance(node.operation, PolicyGradient) and node.operation.kl_target is not None:
            operation: Any = AdaptiveKl(node.operation)
            updates[f"graph.{node.name}"] = operation
            nodes.append(replace(node, operation=operation))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes)), updates
