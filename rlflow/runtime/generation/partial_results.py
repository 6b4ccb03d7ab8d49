"""Parts of what is written, for whoever works on them while the rest is being written.

Nodes that work on parts of what is generated while the rest is being written: rewards, and what is made of them.

Their outputs are the same as if they had waited.
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

# What an engine writes is handed over in about so many parts.
_PARTS = 8
# Seconds of a generation before the first of them: what is shorter is worth no messages.
_BEFORE_S = 1.0


class Listener(Protocol):
    """Whoever works on them."""

    def add(self, rank: int, part: Rollouts) -> None:
        """Samples that an engine is done with, each in one part at most."""

    def lose(self, rank: int) -> None:
        """All that this engine has written is lost, and will be written anew by others."""


class Listening:
    """To one generation."""

    def __init__(self, listener: Listener, rows: int, num_engines: int) -> None:
        """``rows`` are to be written by all engines together."""
        self.size = max(1, -(-rows // (_PARTS * max(1, num_engines))))
        """Rows of a part."""
        self._listener = listener
        self._from = time.monotonic() + _BEFORE_S
        self._done: dict[int, list[int]] = defaultdict(list)
        self._parts: list[tuple[int, Rollouts]] = []

    @property
    def parts(self) -> list[Rollouts]:
        """That are not lost."""
        return [part for _, part in self._parts]

    def due(self, rank: int, ended: Sequence[int]) -> list[int]:
        """Rows that this engine is to hand over, now that it has ended these; none as long as they are few."""
        done = self._done[rank]
        done += ended
        if len(done) < self.size or time.monotonic() < self._from:
            return []
        return self._done.pop(rank)

    def add(self, rank: int, part: Rollouts) -> None:
        """What it has handed over."""
        self._parts.append((rank, part))
        self._listener.add(rank, part)

    def lose(self, rank: int) -> None:
        self._parts = [each for each in self._parts if each[0] != rank]
        self._listener.lose(rank)


Run = Callable[[GraphNode, Mapping[str, Any]], Any]
"""A node on edges by their names."""


class Streaming:
    """A generation, and the nodes that follow it: each works in a thread, on one part after another."""

    def __init__(self, generator: GraphNode, nodes: Sequence[GraphNode], run: Run) -> None:
        self._generator, self._nodes, self._run = generator, nodes, run
        self._parts: list[tuple[int, NDArray[np.int64], dict[str, Future[tuple[Any, float]]]]] = []
        """The engine that wrote a part, the keys of its samples, and of each node what it makes of it, in how long."""
        self._running = ExitStack()
        self._threads = {node.name: self._running.enter_context(ThreadPoolExecutor(1, node.name)) for node in nodes}

    def __enter__(self) -> "Streaming":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._running.close()

    def add(self, rank: int, part: Rollouts) -> None:
        """The nodes are given it. Returns at once."""
        made: dict[str, Future[tuple[Any, float]]] = {}
        for node in self._nodes:
            before = {origin: made[origin] for origin in node.inputs.values() if origin in made}
            made[node.name] = self._threads[node.name].submit(self._on_part, node, part, before)
        self._parts.append((rank, part.keys, made))

    def lose(self, rank: int) -> None:
        """What was made of the parts of this engine is of no use."""
        self._parts = [each for each in self._parts if each[0] != rank]

    def output(self, node: GraphNode, edges: Mapping[str, Any]) -> tuple[Any, float]:
        """Of a node, once all is written, and the seconds that it has worked for it. ``edges`` are whole.

        Raises what the node raised on any part that is not lost.
        """
        rollouts: Rollouts = edges[self._generator.name]
        keys, outputs, seconds = [], [], 0.0
        for _, of_part, made in self._parts:
            output, took = made.pop(node.name).result()
            keys.append(of_part)
            outputs.append(output)
            seconds += took
        began = time.perf_counter()
        rows = _rows_of(np.concatenate([rollouts.keys[:0], *keys]), rollouts.keys)
        if rest := np.setdiff1d(np.arange(len(rollouts)), rows).tolist():
            left = np.array(rest)
            of_rest = {name: edge.take(left) for name, edge in edges.items() if name in node.inputs.values()}
            outputs.append(self._run(node, of_rest if outputs else edges))
            rows = np.concatenate([rows, left])
        whole = type(outputs[0]).concatenate(outputs).take(np.argsort(rows)) if len(outputs) > 1 else outputs[0]
        return whole, seconds + time.perf_counter() - began

    def _on_part(
        self, node: GraphNode, part: Rollouts, before: "Mapping[str, Future[tuple[Any, float]]]"
    ) -> tuple[Any, float]:
        edges = {self._generator.name: part} | {name: made.result()[0] for name, made in before.items()}
        began = time.perf_counter()
        output: Batch = self._run(node, edges)
        return output, time.perf_counter() - began


def _rows_of(keys: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each key among others, all of which differ."""
    _, number = np.unique(np.concatenate([among, keys]), axis=0, return_inverse=True)
    place = np.empty(len(among), np.int64)
    place[number[: len(among)]] = np.arange(len(among))
    return np.asarray(place[number[len(among) :]])
