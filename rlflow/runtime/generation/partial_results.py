"""Rollouts that leave a generation before its end: for nodes that work on parts of it, and for complete steps.

The outputs of such nodes are the same as if they had waited for the whole generation.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Batch, Rollouts
from rlflow.compiler.graph import GraphNode
from rlflow.engines.group_progress import GroupProgress
from rlflow.runtime.protocols import Subscriber

# An engine delivers its rollouts in about so many parts.
_PARTS = 8
# Seconds of a generation before the first part: shorter generations are not worth the messages.
_MIN_SECONDS = 1.0


class EarlyResults(Protocol):
    """The finished rows of one generation that engines deliver before its end."""

    @property
    def delivered(self) -> list[Rollouts]:
        """Return the parts of all engines that have not failed."""

    def due(self, rank: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Note rows that an engine has finished. Return those that must be delivered now, by engine."""

    def deliver(self, rank: int, part: Rollouts) -> None:
        """Take a part that an engine delivers."""

    def discard_engine(self, rank: int) -> None:
        """Discard the parts of a failed engine."""


class PartialResults:
    """Early results for a subscriber, in parts of about the same size."""

    def __init__(self, subscriber: Subscriber, num_rows: int, num_engines: int) -> None:
        """Deliver to ``subscriber``. All engines together generate ``num_rows``."""
        self.part_rows = max(1, -(-num_rows // (_PARTS * max(1, num_engines))))
        """The rows of a part, at least."""
        self._subscriber = subscriber
        self._start = time.monotonic() + _MIN_SECONDS
        self._finished: dict[int, list[int]] = defaultdict(list)
        self._delivered: list[tuple[int, Rollouts]] = []

    @property
    def delivered(self) -> list[Rollouts]:
        return [part for _, part in self._delivered]

    def due(self, rank: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Note rows that an engine has finished. Return those that it must deliver now: none while they are few."""
        finished = self._finished[rank]
        finished += rows
        if len(finished) < self.part_rows or time.monotonic() < self._start:
            return {}
        return {rank: self._finished.pop(rank)}

    def deliver(self, rank: int, part: Rollouts) -> None:
        self._delivered.append((rank, part))
        self._subscriber.receive(rank, part)

    def discard_engine(self, rank: int) -> None:
        self._delivered = [each for each in self._delivered if each[0] != rank]
        self._subscriber.discard_engine(rank)


class CompleteSteps:
    """Early results for training: all rollouts of a step, as soon as the last of them is finished."""

    def __init__(
        self, on_step: Callable[[int, Rollouts], None], groups: GroupProgress, prompt_steps: NDArray[np.int64]
    ) -> None:
        """Deliver the rows that are not done in ``groups``, together with the others of their step, to ``on_step``.

        ``prompt_steps`` [P] are the steps of the prompts.
        """
        self._on_step, self._groups = on_step, groups
        self._step_of = np.repeat(prompt_steps, len(groups.done) // max(1, len(prompt_steps)))
        steps, counts = np.unique(self._step_of[~groups.done], return_counts=True)
        self._num_rows = dict(zip(steps.tolist(), counts.tolist(), strict=True))
        """The rows that each step waits for, from the start. A complete step is removed."""
        self._finished: dict[int, dict[int, int]] = {step: {} for step in self._num_rows}
        """The engine of each finished row, by step."""
        self._requested: set[int] = set()
        self._delivered: list[tuple[int, Rollouts]] = []

    @property
    def delivered(self) -> list[Rollouts]:
        return [part for _, part in self._delivered]

    def due(self, rank: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Note rows that an engine has finished. Return all rows of the steps that they complete, by engine."""
        due: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            step = int(self._step_of[row])
            if step not in self._num_rows:
                continue
            finished = self._finished[step]
            finished[row] = rank
            if len(finished) == self._num_rows[step]:
                for each in finished.keys() - self._requested:
                    due[finished[each]].append(each)
                self._requested |= finished.keys()
        return due

    def deliver(self, rank: int, part: Rollouts) -> None:
        """Take a part, and hand over the steps that it completes."""
        self._delivered.append((rank, part))
        for step in np.unique(part.keys[:, 0]).tolist():
            if sum(int((each.keys[:, 0] == step).sum()) for each in self.delivered) == self._num_rows.get(step):
                del self._num_rows[step], self._finished[step]
                rollouts = self._groups.merge(self.delivered)
                assert rollouts is not None
                self._on_step(step, rollouts.take(np.flatnonzero(rollouts.keys[:, 0] == step)))

    def discard_engine(self, rank: int) -> None:
        """Discard the parts of a failed engine, whose rows others will generate. Complete steps have left."""
        self._delivered = [each for each in self._delivered if each[0] != rank]
        for finished in self._finished.values():
            lost = {row for row, engine in finished.items() if engine == rank}
            self._requested -= lost
            for row in lost:
                del finished[row]


RunNode = Callable[[GraphNode, Mapping[str, Any]], Any]
"""Runs a node on edges by their names."""


class StreamingNodes:
    """A generation and the nodes that follow it. Each node works in a thread, on one part after another."""

    def __init__(self, generator: GraphNode, nodes: Sequence[GraphNode], run: RunNode) -> None:
        """Take the node that generates, and the nodes that follow it in their order."""
        self._generator, self._nodes, self._run = generator, nodes, run
        self._parts: list[tuple[int, NDArray[np.int64], dict[str, Future[tuple[Any, float]]]]] = []
        """The engine of each part, the keys of its samples, and each node's output for it with the seconds it took."""
        self._running = ExitStack()
        self._threads = {node.name: self._running.enter_context(ThreadPoolExecutor(1, node.name)) for node in nodes}

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
        outputs: dict[str, Future[tuple[Any, float]]] = {}
        for node in self._nodes:
            inputs = {origin: outputs[origin] for origin in node.inputs.values() if origin in outputs}
            outputs[node.name] = self._threads[node.name].submit(self._run_on_part, node, part, inputs)
        self._parts.append((rank, part.keys, outputs))

    def discard_engine(self, rank: int) -> None:
        """Discard the outputs for the parts of a failed engine."""
        self._parts = [each for each in self._parts if each[0] != rank]

    def output(self, node: GraphNode, edges: Mapping[str, Any]) -> tuple[Any, float]:
        """Return a node's output for the complete ``edges``, and the seconds that the node worked for it.

        Raises what the node raised on any part that is not discarded.
        """
        rollouts: Rollouts = edges[self._generator.name]
        keys, outputs, seconds = [], [], 0.0
        for _, part_keys, part_outputs in self._parts:
            output, part_seconds = part_outputs.pop(node.name).result()
            keys.append(part_keys)
            outputs.append(output)
            seconds += part_seconds
        start = time.perf_counter()
        rows = _find_rows(np.concatenate([rollouts.keys[:0], *keys]), rollouts.keys)
        if missing := np.setdiff1d(np.arange(len(rollouts)), rows).tolist():
            rest = np.array(missing)
            rest_edges = {name: edge.take(rest) for name, edge in edges.items() if name in node.inputs.values()}
            outputs.append(self._run(node, rest_edges if outputs else edges))
            rows = np.concatenate([rows, rest])
        if len(outputs) > 1:
            return type(outputs[0]).concatenate(outputs).take(np.argsort(rows)), seconds + time.perf_counter() - start
        return outputs[0], seconds + time.perf_counter() - start

    def _run_on_part(
        self, node: GraphNode, part: Rollouts, inputs: "Mapping[str, Future[tuple[Any, float]]]"
    ) -> tuple[Any, float]:
        edges = {self._generator.name: part} | {name: output.result()[0] for name, output in inputs.items()}
        start = time.perf_counter()
        output: Batch = self._run(node, edges)
        return output, time.perf_counter() - start


def _find_rows(keys: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of each key in ``among``, whose keys all differ."""
    _, number = np.unique(np.concatenate([among, keys]), axis=0, return_inverse=True)
    row = np.empty(len(among), np.int64)
    row[number[: len(among)]] = np.arange(len(among))
    return np.asarray(row[number[len(among) :]])
