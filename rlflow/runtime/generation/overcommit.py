"""Generation ahead of the step that trains on the responses, and its partial rollouts between steps."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.batch import Packed, Prompts, Repeated, Rollouts
from rlflow.compiler.graph import Graph
from rlflow.data.source import DataSource
from rlflow.engines.base import Continues
from rlflow.engines.group_progress import GroupProgress
from rlflow.nodes.generate import Generate
from rlflow.packed import offsets_of

_STATE = "begun.npz"


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
        arrays: dict[str, Any] = {"prompts": none if self._prompts is None else self._prompts.keys}
        if (partial := self._partial) is not None:
            texts = np.frombuffer(json.dumps(list(partial.texts)).encode(), np.uint8)
            arrays |= {"keys": partial.keys, "finished": partial.finished, "lengths": partial.response_ids.lengths}
            arrays |= {name: getattr(partial, name).values for name in ("response_ids", "logprobs", "versions")}
            arrays["texts"] = texts
        np.savez(folder / _STATE, **arrays)

    def restore(self, folder: Path) -> None:
        """Restore what ``save`` saved."""
        with np.load(folder / _STATE) as saved:
            arrays = dict(saved)
        self._prompts = self._data.prompts_with_keys(arrays["prompts"]) if len(arrays["prompts"]) else None
        self._partial = None
        if "keys" in arrays:
            assert self._prompts is not None
            rows = GroupProgress(self._prompts, self._sampling).rows_of(arrays["keys"])
            row_prompts = self._prompts.take(rows // self._sampling.group_size)
            offsets = offsets_of(arrays["lengths"])
            partial = Rollouts(
                keys=arrays["keys"],
                prompt_ids=row_prompts.ids,
                response_ids=Packed(arrays["response_ids"], offsets),
                logprobs=Packed(arrays["logprobs"], offsets),
                versions=Repeated.from_packed(Packed(arrays["versions"], offsets)),
                finished=arrays["finished"],
                temperature=self._sampling.scoring_temperature,
                texts=tuple(json.loads(arrays["texts"].tobytes())),
                rows=row_prompts.rows,
            )
            self._partial = self._data.copy_locally(partial)


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
