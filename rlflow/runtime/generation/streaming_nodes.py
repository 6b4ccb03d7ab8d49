"""Nodes that work on parts of a generation before its end: single samples, or complete groups, as their unit says.

Their outputs are the same as if they had waited for the whole generation.

Shapes: P prompts, G group size, R = P x G samples; ``sample`` of ``prompt`` is row ``prompt * G + sample``.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Batch, Prompts, Rollouts
from rlflow.engines.group_progress import GroupProgress
from rlflow.nodes.base import GraphNode
from rlflow.runtime.objects.store import host_of

Ints = NDArray[np.int64]
RunNode = Callable[[GraphNode, Mapping[str, Any]], Any]
"""Runs a node on edges by their names."""

# Group nodes run when so large a share of all groups is complete and new to them.
_GROUP_SHARE = 1 / 8


@dataclass(frozen=True, eq=False)
class _Part:
    """Some rows of a generation, and what the nodes make of them."""

    ranks: frozenset[int]
    """The engines that generated the rows."""
    rows: Ints
    edges: dict[str, Callable[[], Any]]
    """For each edge, a function that waits for the values of these rows."""
    host: str | None = None
    """The host that the rows lie on; None: several hosts, or this process."""


class StreamingNodes:
    """A generation and the nodes that follow it. Each node works in a thread, on one part after another.

    A node that runs on every host has a thread for each of them.
    A node works on complete groups if its unit is the group, or if it reads a node that does.
    """

    def __init__(self, generator: GraphNode, nodes: Sequence[GraphNode], run: RunNode, prompts: Prompts) -> None:
        """Take the node that generates responses to ``prompts``, and the nodes that follow it in their order."""
        operation: Any = generator.operation
        self._generator, self._run = generator.name, run
        self._group_size: int = operation.group_size
        self._groups = GroupProgress(prompts, operation.sampling)
        self._is_grouped = np.zeros(len(prompts), np.bool_)
        """[P]: the nodes that work on groups have the group."""
        self._by_group: list[GraphNode] = []
        for node in nodes:
            if node.operation.unit == "group" or {other.name for other in self._by_group} & set(node.inputs.values()):
                self._by_group.append(node)
        self._by_sample = [node for node in nodes if node not in self._by_group]
        self._parts: list[_Part] = []
        self._group_parts: list[_Part] = []
        self._times: dict[str, list[tuple[float, float]]] = {node.name: [] for node in nodes}
        """The times at which each node began and ended its work on a part."""
        self._running = ExitStack()
        self._threads: dict[tuple[str, str | None], ThreadPoolExecutor] = {}

    def __enter__(self) -> "StreamingNodes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._running.close()

    def receive(self, rank: int, part: Rollouts) -> None:
        """Queue a part of an engine's rollouts for all nodes. Returns at once."""
        rows = self._groups.rows_of(part.keys)
        self._parts.append(_Part(frozenset({rank}), rows, {self._generator: lambda: part}, host_of(part)))
        self._submit(self._by_sample, self._parts[-1])
        self._groups.done[rows] = True
        new = self._groups.complete & ~self._is_grouped
        if self._by_group and new.sum() >= max(1, _GROUP_SHARE * len(new)):
            self._is_grouped |= new
            self._group_parts.append(self._gather(new))
            self._submit(self._by_group, self._group_parts[-1])

    def discard_engine(self, rank: int) -> None:
        """Discard the outputs for the parts of a failed engine, and for groups of which it generated samples."""
        self._parts = [part for part in self._parts if rank not in part.ranks]
        self._group_parts = [part for part in self._group_parts if rank not in part.ranks]
        self._groups.done[:] = False
        self._is_grouped[:] = False
        for part in self._parts:
            self._groups.done[part.rows] = True
        for part in self._group_parts:
            self._is_grouped[part.rows // self._group_size] = True

    def end(self) -> None:
        """Release the rollouts of all parts, since the generation is complete."""
        for part in (*self._parts, *self._group_parts):
            part.edges.pop(self._generator)

    def output(self, node: GraphNode, edges: Mapping[str, Any]) -> tuple[Any, list[tuple[float, float]]]:
        """Return a node's output for the complete ``edges``, and the spans of time in which the node worked.

        Raises what the node raised on any part that is not discarded.
        """
        parts, unit = (self._group_parts, self._group_size) if node in self._by_group else (self._parts, 1)
        outputs = [part.edges.pop(node.name)() for part in parts]
        start = time.perf_counter()
        num_rows = len(self._groups.done)
        rows = np.concatenate([np.zeros(0, np.int64), *(part.rows for part in parts)])
        rest = np.setdiff1d(np.arange(num_rows), rows)
        if len(rest):
            inputs = {origin: edges[origin] for origin in node.inputs.values()}
            if outputs:
                units = rest[::unit] // unit
                inputs = {origin: batch.take_units(units, num_rows // unit) for origin, batch in inputs.items()}
            # In the node's thread, which may still be at a part that has been discarded.
            outputs.append(self._thread(node, None).submit(copy_context().run, self._run, node, inputs).result())
        output = type(outputs[0]).concatenate(outputs)
        if len(outputs) > 1:
            units = np.concatenate([rows, rest])[::unit] // unit
            output = output.take_units(np.argsort(units), len(units))
        return output, merged([*self._times[node.name], (start, time.perf_counter())])

    def _submit(self, nodes: Sequence[GraphNode], part: _Part) -> None:
        for node in nodes:
            inputs = {origin: part.edges[origin] for origin in node.inputs.values()}
            part.edges[node.name] = self._thread(node, part.host).submit(self._run_on_part, node, inputs).result

    def _thread(self, node: GraphNode, host: str | None) -> ThreadPoolExecutor:
        key = node.name, host if node.runs_on_every_host else None
        if key not in self._threads:
            self._threads[key] = self._running.enter_context(ThreadPoolExecutor(1, node.name))
        return self._threads[key]

    def _gather(self, is_chosen: NDArray[np.bool_]) -> _Part:
        """Return a part of the chosen groups [P], with their rows in order."""
        chosen = [(part, np.flatnonzero(is_chosen[part.rows // self._group_size])) for part in self._parts]
        chosen = [(part, rows) for part, rows in chosen if len(rows)]
        rows = np.concatenate([part.rows[part_rows] for part, part_rows in chosen])
        order = np.argsort(rows)
        names = [self._generator, *(node.name for node in self._by_sample)]
        edges: dict[str, Callable[[], Any]] = {
            name: partial(_join, [(part.edges[name], part_rows) for part, part_rows in chosen], order) for name in names
        }
        return _Part(frozenset().union(*(part.ranks for part, _ in chosen)), rows[order], edges)

    def _run_on_part(self, node: GraphNode, inputs: Mapping[str, Callable[[], Any]]) -> Any:
        edges = {origin: values() for origin, values in inputs.items()}
        start = time.perf_counter()
        output: Batch = self._run(node, edges)
        self._times[node.name].append((start, time.perf_counter()))
        return output


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of time that cover the same time as these, and do not overlap."""
    intervals: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if intervals and start <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], end)
        else:
            intervals.append((start, end))
    return intervals


def _join(parts: Sequence[tuple[Callable[[], Any], Ints]], order: Ints) -> Any:
    """Return rows of the values of several parts, in this order."""
    values = [read().take(rows) for read, rows in parts]
    return type(values[0]).concatenate(values).take(order)
