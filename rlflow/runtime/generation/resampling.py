"""Steps that choose their prompts: by a curriculum, or in rounds until enough have responses with different rewards."""

import json
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.batch import Prompts, Selection, Sequences
from rlflow.compiler.graph import Graph
from rlflow.data.source import DataSource
from rlflow.nodes.base import GraphNode
from rlflow.nodes.curriculum import Curriculum
from rlflow.recipe import Recipe
from rlflow.runtime.objects.store_usage import count_towards

_STATE = "place.json"
# The smallest round as a share of a batch. Few prompts take nearly as long as many, and more of them make another round
# less likely.
_MIN_ROUND = 0.25

RunGraph = Callable[[Graph, dict[str, Any], Callable[[str, Any], None]], dict[str, float]]
"""Runs a graph once on its edges, and returns the seconds of each node (``GraphRunner.run``)."""


class DataOrder:
    """The prompts of a run in the order of the data."""

    def __init__(self, data: DataSource) -> None:
        self._data = data
        self._next_prompt = 0
        """The number of prompts read so far in the run. How many a step takes shows only while it runs."""

    def take(self, step: int, first: int, count: int) -> Prompts:
        """Return the next prompts, which are numbered from ``first`` in their step."""
        prompts = self._data.prompts_from(self._next_prompt, step, first, count)
        self._next_prompt += count
        return prompts

    def learn(self, selection: Selection) -> None:
        """Learn nothing: rewards do not change this order."""

    def metrics(self) -> Mapping[str, float]:
        """Return nothing: there is nothing to report."""
        return {}

    def state(self) -> int:
        """Return the position in the prompts."""
        return self._next_prompt

    def load_state(self, saved: int) -> None:
        """Restore the position in the prompts."""
        self._next_prompt = saved


class CurriculumOrder:
    """The prompts of a run in an order that their rewards change (``rlflow.nodes.curriculum``)."""

    def __init__(self, data: DataSource, curriculum: Curriculum, seed: int) -> None:
        self._data = data
        self._difficulty = curriculum.new_order(data.labels(curriculum.by), seed)
        self._drawn = np.zeros(0, np.int64)
        """The rows of the step so far."""
        self._asked = 0
        """The number of rows of the current round, the last of those."""

    def take(self, step: int, first: int, count: int) -> Prompts:
        """Return prompts for a round of a step, which are numbered from ``first``."""
        rows = self._difficulty.draw(step, first, count)
        self._drawn, self._asked = np.concatenate([self._drawn[:first], rows]), count
        return self._data.prompts_of(rows, step, first)

    def learn(self, selection: Any) -> None:
        """Learn from the success of the last round's prompts."""
        self._difficulty.learn(self._drawn[-self._asked :], selection.success)

    def metrics(self) -> Mapping[str, float]:
        """Return what is known after the step."""
        return self._difficulty.metrics(self._drawn)

    def state(self) -> Any:
        """Return what is known of the rows."""
        return self._difficulty.state()

    def load_state(self, saved: Any) -> None:
        """Restore what is known of the rows."""
        self._difficulty.load_state(saved)


class ResamplingRounds:
    """The nodes of a graph that run in rounds. Checkpoints save and restore them like a trained engine."""

    def __init__(self, nodes: tuple[GraphNode, ...], recipe: Recipe, data: DataSource, run_graph: RunGraph) -> None:
        """Run these nodes by ``run_graph``, for the steps of a recipe."""
        self._run_graph, self._nodes = run_graph, nodes
        self._name = self._nodes[-1].name
        operation: Any = self._nodes[-1].operation
        self._max_rounds: int = getattr(operation, "max_rounds", 1)
        self._batch_size = recipe.data.batch_size
        is_curriculum = isinstance(operation, Curriculum)
        self._order = CurriculumOrder(data, operation, recipe.seed) if is_curriculum else DataOrder(data)

    @property
    def path(self) -> str:
        """Return the path of the last node of the rounds in the recipe."""
        return f"graph.{self._name}"

    def run(
        self, step: int, edges: dict[str, Any], on_output: Callable[[str, Any], None]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Put the outputs for the chosen prompts into ``edges``, and return the seconds of each node, and metrics.

        ``edges`` stays empty when no prompt is chosen. ``on_output`` gets the outputs of all rounds, chosen or not.
        """
        rounds: list[dict[str, Any]] = []
        seconds = {node.name: 0.0 for node in self._nodes}
        answered = num_chosen = 0
        while num_chosen < self._batch_size and len(rounds) < self._max_rounds:
            count = self._round_size(answered, num_chosen)
            with count_towards("prompts"):
                part: dict[str, Any] = {"prompts": self._order.take(step, answered, count)}
            answered += count
            took = self._run_graph(Graph(nodes=self._nodes), dict(part), part.__setitem__)
            seconds = {name: before + took[name] for name, before in seconds.items()}
            self._order.learn(part[self._name])
            num_chosen += int(part[self._name].chosen.sum())
            rounds.append(part)
        outputs = {name: type(first).concatenate([part[name] for part in rounds]) for name, first in rounds[0].items()}
        for name, batch in outputs.items():
            on_output(name, batch)
        chosen = np.flatnonzero(outputs.pop(self._name).chosen)[: self._batch_size]
        if len(chosen):
            edges.update({name: batch.take_units(chosen, answered) for name, batch in outputs.items()})
        metrics = {
            "rounds": len(rounds),
            "differing": num_chosen / answered,
            "missing": self._batch_size - len(chosen),
            **self._order.metrics(),
            "tokens": sum(int(batch.own_lengths.sum()) for batch in edges.values() if isinstance(batch, Sequences)),
        }
        return seconds, {f"{self._name}/{name}": float(value) for name, value in metrics.items()}

    def save(self, folder: Path) -> None:
        """Save the position in the prompts, or what is known of them."""
        (folder / _STATE).write_text(json.dumps(self._order.state()))

    def restore(self, folder: Path) -> None:
        """Restore what ``save`` saved."""
        self._order.load_state(json.loads((folder / _STATE).read_text()))

    def close(self) -> None:
        """Run nothing more: no round outlives its step."""

    def _round_size(self, answered: int, num_chosen: int) -> int:
        """Return the prompts of the next round: enough for those missing at the rate so far, and a batch at most."""
        if not num_chosen:
            return self._batch_size
        missing = (self._batch_size - num_chosen) * answered / num_chosen
        return min(self._batch_size, ceil(max(missing, _MIN_ROUND * self._batch_size)))
