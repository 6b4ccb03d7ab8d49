"""Prompts that are begun before the step that trains on them, and what is written of them between steps."""

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


class Overcommitted:
    """Runs in the place of a generate node with ``overcommit``. It is saved and restored as trained engines are."""

    unit = "sample"

    def __init__(self, generate: Generate, enough: int, data: DataSource) -> None:
        """``enough``: prompts that a step trains on. What is left of a step is with ``data`` until the next one, since
        engines may die, and a block is in the store as long as any row of it is wanted."""
        self._sampling, self._enough, self._data = generate.sampling, enough, data
        self._prompts: Prompts | None = None
        self._begun: Rollouts | None = None

    def run(self, engine: Continues, prompts: Prompts) -> Rollouts:
        """The first groups that are whole, in the order of keys, of those begun before and of ``prompts``."""
        if self._prompts is not None:
            prompts = Prompts.concatenate([self._prompts, prompts])
        written = engine.continue_rollouts(prompts, self._sampling, self._begun, self._enough)
        groups = GroupProgress(prompts, self._sampling, written)
        given = np.flatnonzero(groups.complete)[: self._enough]
        assert len(given) == self._enough
        left = np.setdiff1d(np.arange(len(prompts)), given)
        is_given = np.isin(groups.rows_of(written.keys) // self._sampling.group_size, given)
        self._prompts = self._data.prompts_with_keys(prompts.keys[left]) if len(left) else None
        self._begun = None if is_given.all() else self._data.copy_locally(written.take(np.flatnonzero(~is_given)))
        return written.take(np.flatnonzero(is_given))

    def save(self, folder: Path) -> None:
        """Prompts by their keys, and what is written of them."""
        none = np.zeros((0, 3), np.int64)
        arrays: dict[str, Any] = {"prompts": none if self._prompts is None else self._prompts.keys}
        if (begun := self._begun) is not None:
            texts = np.frombuffer(json.dumps(list(begun.texts)).encode(), np.uint8)
            arrays |= {"keys": begun.keys, "finished": begun.finished, "lengths": begun.response_ids.lengths}
            arrays |= {name: getattr(begun, name).values for name in ("response_ids", "logprobs", "versions")}
            arrays["texts"] = texts
        np.savez(folder / _STATE, **arrays)

    def restore(self, folder: Path) -> None:
        with np.load(folder / _STATE) as saved:
            arrays = dict(saved)
        self._prompts = self._data.prompts_with_keys(arrays["prompts"]) if len(arrays["prompts"]) else None
        self._begun = None
        if "keys" in arrays:
            assert self._prompts is not None
            rows = GroupProgress(self._prompts, self._sampling).rows_of(arrays["keys"])
            of_each = self._prompts.take(rows // self._sampling.group_size)
            offsets = offsets_of(arrays["lengths"])
            begun = Rollouts(
                keys=arrays["keys"],
                prompt_ids=of_each.ids,
                response_ids=Packed(arrays["response_ids"], offsets),
                logprobs=Packed(arrays["logprobs"], offsets),
                versions=Repeated.from_packed(Packed(arrays["versions"], offsets)),
                finished=arrays["finished"],
                temperature=self._sampling.scoring_temperature,
                texts=tuple(json.loads(arrays["texts"].tobytes())),
                rows=of_each.rows,
            )
            self._begun = self._data.copy_locally(begun)


def begun_ahead(graph: Graph, batch_size: int) -> int:
    """Prompts that are begun before the step that they would be trained in."""
    return sum(node.operation.begun_ahead(batch_size) for node in graph.nodes if isinstance(node.operation, Generate))


def overcommitted(graph: Graph, batch_size: int, data: DataSource) -> tuple[Graph, Mapping[str, Overcommitted]]:
    """The graph for training, and by their paths what is to be saved of it. Without ``overcommit`` it is the same."""
    begun: dict[str, Overcommitted] = {}
    nodes = []
    for node in graph.nodes:
        if isinstance(node.operation, Generate) and node.operation.overcommit:
            operation: Any = Overcommitted(node.operation, batch_size, data)
            begun[f"graph.{node.name}"] = operation
            nodes.append(replace(node, operation=operation))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes)), begun
