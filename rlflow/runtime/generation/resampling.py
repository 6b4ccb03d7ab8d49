"""Steps that ask for more prompts until enough of them teach something."""

import json
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Batch, Sequences
from rlflow.compiler.graph import Graph, resampled_nodes
from rlflow.data.source import DataSource
from rlflow.runtime.objects.budget import edge
from rlflow.runtime.protocols import Engines
from rlflow.runtime.step import run_graph

_STATE = "place.json"
# Of a batch, in a round at least: few prompts take nearly as long as many, and more make another round less likely.
_LEAST = 0.25


class Rounds:
    """Runs what a graph does in rounds. It is saved and restored as trained engines are."""

    def __init__(self, graph: Graph, enough: int, data: DataSource) -> None:
        """``enough``: prompts that a step trains on."""
        self._nodes = resampled_nodes(graph)
        self._name = self._nodes[-1].name
        operation: Any = self._nodes[-1].operation
        self._max_rounds: int = operation.max_rounds
        self._enough, self._data = enough, data
        # Of the next prompt among those of the run: how many a step takes is seen when it has them.
        self._place = 0

    @property
    def path(self) -> str:
        return f"graph.{self._name}"

    def run(
        self, engines: Engines, step: int, edges: dict[str, Any], made: Callable[[str, Any], None]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of each node, and metrics. What has been made for the chosen prompts, and these, comes to ``edges``;
        nothing where there are none. ``made`` is told what all rounds together have made, chosen or not."""
        rounds: list[dict[str, Any]] = []
        seconds = {node.name: 0.0 for node in self._nodes}
        answered = found = 0
        while found < self._enough and len(rounds) < self._max_rounds:
            count = self._wanted(answered, found)
            with edge("prompts"):
                part: dict[str, Any] = {"prompts": self._data.prompts_from(self._place, step, answered, count)}
            self._place, answered = self._place + count, answered + count
            took = run_graph(Graph(nodes=self._nodes), engines, dict(part), part.__setitem__)
            seconds = {name: before + took[name] for name, before in seconds.items()}
            found += int(part[self._name].chosen.sum())
            rounds.append(part)
        whole = {name: type(first).concatenate([each[name] for each in rounds]) for name, first in rounds[0].items()}
        for name, batch in whole.items():
            made(name, batch)
        chosen = np.flatnonzero(whole.pop(self._name).chosen)[: self._enough]
        if len(chosen):
            edges.update({name: _of_prompts(batch, chosen, answered) for name, batch in whole.items()})
        metrics = {
            "rounds": len(rounds),
            "differing": found / answered,
            "missing": self._enough - len(chosen),
            "tokens": sum(int(each.own_lengths.sum()) for each in edges.values() if isinstance(each, Sequences)),
        }
        return seconds, {f"{self._name}/{name}": float(value) for name, value in metrics.items()}

    def save(self, folder: Path) -> None:
        (folder / _STATE).write_text(json.dumps(self._place))

    def restore(self, folder: Path) -> None:
        self._place = json.loads((folder / _STATE).read_text())

    def _wanted(self, answered: int, found: int) -> int:
        """As many prompts as what is missing takes, if of these as many differ as of those before; a batch at most."""
        if not found:
            return self._enough
        missing = (self._enough - found) * answered / found
        return min(self._enough, ceil(max(missing, _LEAST * self._enough)))


def _of_prompts(batch: Batch, chosen: NDArray[np.int64], answered: int) -> Batch:
    """Rows are in the order of keys, and each prompt has as many."""
    each, rest = divmod(len(batch), answered)
    assert not rest
    return batch.take((chosen[:, None] * each + np.arange(each)).ravel())
