"""Generation ahead of the step that trains on the responses, and its partial rollouts between steps."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.batch import Prompts, Rollouts
from rlflow.compiler.graph import Graph
from rlflow.data.source import DataSource
from rlflow.engines.base import Continues
from rlflow.engines.group_progress import GroupProgress
from rlflow.nodes.generate import Generate
from rlflow.runtime.generation.saved_rollouts import load_rollouts, save_rollouts

_PROMPTS, _PARTIAL = "prompts.npy", "partial.npz"


class OvercommittedGenerate:
    """A generate node with ``overcommit``, as it runs. Checkpoints save and restore it like a trained engine."""

    unit = "sample"

    def __init__(self, generate: Generate, batch_size: int, data: DataSource) -> None:
        """Run ``generate`` for steps that train on ``batch_size`` prompts each.

        Between steps, ``data`` holds a copy of the unfinished groups: engines may die, and a block stays in the object
        store as long as any row of it is in use.
        """
        self._sampling, self._batch_size, self._data = generate.sampling, batch_size, data
        self._prompts: Prompts | None = None
        """The prompts of groups that are not complete."""
        self._partial: Rollouts | None = None
        """The rollouts of these groups, as far as they are."""

    def run(self, engine: Continues, prompts: Prompts) -> Rollouts:
        """Return the first complete groups of earlier steps and of ``prompts``, in the order of keys."""
        if self._prompts is not None:
            prompts = Prompts.concatenate([self._prompts, prompts])
        rollouts = engine.continue_rollouts(prompts, self._sampling, self._partial, self._batch_size)
        groups = GroupProgress(prompts, self._sampling, rollouts)
        chosen = np.flatnonzero(groups.complete)[: self._batch_size]
        assert len(chosen) == self._batch_size
        left = np.setdiff1d(np.arange(len(prompts)), chosen)
        is_chosen = np.isin(groups.rows_of(rollouts.keys) // self._sampling.group_size, chosen)
        self._prompts = self._data.prompts_with_keys(prompts.keys[left]) if len(left) else None
        self._partial = None if is_chosen.all() else self._data.copy_locally(rollouts.take(np.flatnonzero(~is_chosen)))
        return rollouts.take(np.flatnonzero(is_chosen))

    def save(self, folder: Path) -> None:
        """Save the prompts by their keys, and their rollouts."""
        none = np.zeros((0, 3), np.int64)
        np.save(folder / _PROMPTS, none if self._prompts is None else self._prompts.keys)
        if self._partial is not None:
            assert self._prompts is not None
            save_rollouts(folder / _PARTIAL, self._partial, self._prompts)

    def restore(self, folder: Path) -> None:
        """Restore what ``save`` saved."""
        keys = np.load(folder / _PROMPTS)
        self._prompts = self._data.prompts_with_keys(keys) if len(keys) else None
        self._partial = None
        if (folder / _PARTIAL).exists():
            assert self._prompts is not None
            self._partial = self._data.copy_locally(load_rollouts(folder / _PARTIAL, self._prompts))


def prompts_ahead(graph: Graph, batch_size: int) -> int:
    """Return the number of prompts that are read before the step that they would be trained in."""
    return sum(node.operation.prompts_ahead(batch_size) for node in graph.nodes if isinstance(node.operation, Generate))


def with_overcommit(
    graph: Graph, batch_size: int, data: DataSource
) -> tuple[Graph, Mapping[str, OvercommittedGenerate]]:
    """Return the graph as it runs, and the nodes with ``overcommit`` by their path in the recipe, to be saved."""
    saved: dict[str, OvercommittedGenerate] = {}
    nodes = []
    for node in graph.nodes:
        if isinstance(node.operation, Generate) and node.operation.overcommit:
            operation: Any = OvercommittedGenerate(node.operation, batch_size, data)
            saved[f"graph.{node.name}"] = operation
            nodes.append(replace(node, operation=operation))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes)), saved
