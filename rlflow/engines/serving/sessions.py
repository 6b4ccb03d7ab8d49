"""Writing sample by sample: an engine is given samples when it has room, and says which are done.

Shapes: P prompts, G group, R rows; row ``prompt * G + sample``. Rows and lengths travel as bytes of int32.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.groups import Begun, Groups

Ints = NDArray[np.int64]

# Done rows are told so much later than the first of them, at most, while more rows may come for it.
_LATEST_S = 1.0


@dataclass(frozen=True)
class Progress:
    """What an engine has done since it was last asked."""

    rows: bytes
    """That are done."""
    lengths: bytes
    """Tokens of their responses."""
    steps: int
    """So many tokens it has written so far of each sample that it had all the time."""


class Sessions(ABC):
    """What an engine has that takes new samples while it writes. Its methods may be called from several threads."""

    _session: "_Session | None" = None

    @property
    @abstractmethod
    def room(self) -> tuple[int, int]:
        """Samples that it writes at once, and tokens of prompts and responses that it has room for."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """As in Progress."""

    @abstractmethod
    def submit(self, samples: Prompts, sampling: Sampling, begun: Sequence[Begun] | None = None) -> "list[Future[Any]]":
        """A response to each sample, whatever the group's size. A response has a ``length``. Raises EngineError.

        ``begun``: for each sample what its response begins with, which counts in its ``length``.
        """

    @abstractmethod
    def break_off(self) -> None:
        """All responses end as far as they are. Returns when they are there."""

    @abstractmethod
    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        """Of the samples with their responses."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Raises EngineError."""
        samples = prompts.repeat(sampling.group_size)
        return self.rollouts(samples, [each.result() for each in self.submit(samples, sampling)], sampling)

    def begin(self, prompts: Prompts, sampling: Sampling, begun: Rollouts | None = None) -> tuple[int, int]:
        """Samples of these prompts will be written, from what is ``begun`` of some. The samples of the session before
        are forgotten. Returns ``room``."""
        self._session = _Session(self, prompts, sampling, begun)
        return self.room

    def write(self, rows: bytes, enough: int) -> Progress:
        """Begins these rows. Returns when ``enough`` are done, or some for a second, or all; with 0, when all are.

        Raises EngineError.
        """
        assert self._session is not None
        return self._session.write(np.frombuffer(rows, np.int32).astype(np.int64), enough)

    def stop(self) -> None:
        """What is not done ends as far as it is. ``write`` begins nothing any more, and returns."""
        assert self._session is not None
        self._session.stop()

    def finish(self) -> Rollouts | None:
        """All rows that were written, ascending; after ``stop`` with those that ended by it. None where there are
        none."""
        assert self._session is not None
        session, self._session = self._session, None
        return session.rollouts()

    def write_rows(self, prompts: Prompts, sampling: Sampling, rows: bytes) -> Rollouts | None:
        """All of these rows, ascending: a session in one call. Raises EngineError."""
        session = _Session(self, prompts, sampling)
        session.write(np.frombuffer(rows, np.int32).astype(np.int64), 0)
        return session.rollouts()


class _Session:
    def __init__(self, engine: Sessions, prompts: Prompts, sampling: Sampling, begun: Rollouts | None = None) -> None:
        self._engine, self._prompts, self._sampling = engine, prompts, sampling
        self._groups = None if begun is None else Groups(prompts, sampling, begun)
        self._lock = threading.Lock()
        self._stopped = False
        self._done: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()
        self._responses: dict[int, Any] = {}
        self._num_submitted = 0

    def write(self, rows: Ints, enough: int) -> Progress:
        with self._lock:
            if len(rows) and not self._stopped:
                self._submit(rows)
        told: list[int] = []
        while not told or enough == 0 or len(told) < enough:
            if len(self._responses) == self._num_submitted:
                break
            try:
                row, done = self._done.get(timeout=_LATEST_S)
            except Empty:
                if told and enough:
                    break
                continue
            self._responses[row] = done.result()
            told.append(row)
        lengths = [self._responses[row].length for row in told]
        return Progress(np.array(told, np.int32).tobytes(), np.array(lengths, np.int32).tobytes(), self._engine.steps)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        self._engine.break_off()

    def _submit(self, rows: Ints) -> None:
        begun = [] if self._groups is None else [self._groups.begun_of(rows)]
        futures = self._engine.submit(self._samples(rows), self._sampling, *begun)
        self._num_submitted += len(rows)
        for row, future in zip(rows.tolist(), futures, strict=True):
            future.add_done_callback(partial(self._note, row))

    def _note(self, row: int, done: "Future[Any]") -> None:
        self._done.put((row, done))

    def rollouts(self) -> Rollouts | None:
        while not self._done.empty():
            row, done = self._done.get()
            self._responses[row] = done.result()
        rows = np.array(sorted(row for row, response in self._responses.items() if response.length), np.int64)
        if not len(rows):
            return None
        responses = [self._responses[row] for row in rows.tolist()]
        return self._engine.rollouts(self._samples(rows), responses, self._sampling)

    def _samples(self, rows: Ints) -> Prompts:
        prompts, places = np.divmod(rows, self._sampling.group_size)
        samples = self._prompts.take(prompts)
        keys = samples.keys.copy()
        keys[:, 2] += places
        return replace(samples, keys=keys)
