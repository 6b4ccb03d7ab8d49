"""Writing sample by sample: an engine is given samples when it has room, and says which are done.

Shapes: P prompts, G group, R rows; row ``prompt * G + sample``. Rows and lengths travel as bytes of int32.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import GroupProgress, PartialResponse

Ints = NDArray[np.int64]

# An engine tells of itself so often at least, while more rows may come for it.
_LATEST_S = 1.0
# None that is being written.
_NO_ROW = -1


@dataclass(frozen=True)
class SampleProgress:
    """What an engine has done since it was last asked."""

    rows: bytes
    """That are done."""
    lengths: bytes
    """Tokens of their responses."""
    decode_steps: int
    """So many tokens it has written in this session of each sample that it had all the time."""


class Sessions(ABC):
    """What an engine has that takes new samples while it writes. Its methods may be called from several threads."""

    _session: "_Session | None" = None

    @property
    @abstractmethod
    def capacity(self) -> tuple[int, int]:
        """Samples that it writes at once, and tokens of prompts and responses that it has room for."""

    @property
    @abstractmethod
    def decode_steps(self) -> int:
        """As in SampleProgress, since it was built."""

    @abstractmethod
    def submit(
        self, samples: Prompts, sampling: Sampling, begun: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        """A response to each sample, whatever the group's size. Raises EngineError.

        A response has a ``length``, and ``is_done`` unless it was broken off. ``begun``: for each sample what its
        response begins with, which counts in its ``length``.
        """

    @abstractmethod
    def abort(self, answers: "Collection[Future[Any]]") -> None:
        """These responses end as far as they are. Returns when they are there."""

    @abstractmethod
    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        """Of the samples with their responses."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Raises EngineError."""
        samples = prompts.repeat(sampling.group_size)
        return self.rollouts(samples, [each.result() for each in self.submit(samples, sampling)], sampling)

    def begin_session(self, prompts: Prompts, sampling: Sampling) -> tuple[int, int]:
        """Samples of these prompts will be written. Those of the session before are forgotten. Returns ``capacity``."""
        self._session = _Session(self, prompts, sampling)
        return self.capacity

    def advance(self, rows: bytes, enough: int, begun: Rollouts | None = None) -> SampleProgress:
        """Begins these rows, or goes on with what is ``begun`` of some. Returns when ``enough`` are done, or after a
        second, or when all are; with 0, when all are. Raises EngineError."""
        assert self._session is not None
        return self._session.advance(_rows(rows), enough, begun)

    def preempt(self, rows: bytes) -> Rollouts | None:
        """Those of these rows that are not done are written no further, and are as if they had never been begun here.
        What is written of them, ascending; None where nothing is. Raises EngineError."""
        assert self._session is not None
        return self._session.preempt(_rows(rows))

    def take_rollouts(self, rows: bytes) -> Rollouts:
        """Of these rows, which are told to be done, what is written, ascending: beforehand, for whoever works on it."""
        assert self._session is not None
        return self._session.take_rollouts(_rows(rows))

    def finish_session(self) -> Rollouts | None:
        """All rows that were written and not taken, ascending. None where there are none."""
        assert self._session is not None
        session, self._session = self._session, None
        return session.rollouts()

    def generate_rows(self, prompts: Prompts, sampling: Sampling, rows: bytes) -> Rollouts | None:
        """All of these rows, ascending: a session in one call. Raises EngineError."""
        session = _Session(self, prompts, sampling)
        session.advance(_rows(rows), 0)
        return session.rollouts()


class _Session:
    def __init__(self, engine: Sessions, prompts: Prompts, sampling: Sampling) -> None:
        self._engine, self._prompts, self._sampling = engine, prompts, sampling
        self._lock = threading.Lock()
        self._writing: dict[int, Future[Any]] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._responses: dict[int, Any] = {}
        self._steps_before = engine.decode_steps

    def advance(self, rows: Ints, enough: int, begun: Rollouts | None = None) -> SampleProgress:
        if len(rows):
            self._submit(rows, begun)
        told: list[int] = []
        until = time.monotonic() + _LATEST_S
        while self._writing and (not told or len(told) < enough or enough == 0):
            try:
                row = self._ended.get(timeout=max(0.0, until - time.monotonic()) if enough else _LATEST_S)
            except Empty:
                if enough:
                    break
                continue
            told += self._noted(row)
        lengths = [self._responses[row].length for row in told]
        steps = self._engine.decode_steps - self._steps_before
        return SampleProgress(np.array(told, np.int32).tobytes(), np.array(lengths, np.int32).tobytes(), steps)

    def _noted(self, row: int) -> list[int]:
        """The row, if it is done. Raises what writing it raised."""
        with self._lock:
            answer = self._writing.get(row)
            if answer is None or not answer.done() or not answer.result().is_done:
                return []
            self._responses[row] = self._writing.pop(row).result()
            return [row]

    def preempt(self, rows: Ints) -> Rollouts | None:
        with self._lock:
            answers = {row: self._writing[row] for row in sorted(rows.tolist()) if row in self._writing}
        self._engine.abort(list(answers.values()))
        broken = {row: answer.result() for row, answer in answers.items() if not answer.result().is_done}
        with self._lock:
            for row in broken:
                del self._writing[row]
        # Whoever waits for them does so no longer.
        self._ended.put(_NO_ROW)
        return self._rollouts(broken)

    def take_rollouts(self, rows: Ints) -> Rollouts:
        taken = self._rollouts({row: self._responses.pop(row) for row in sorted(rows.tolist())})
        assert taken is not None
        return taken

    def rollouts(self) -> Rollouts | None:
        """Also of those that are done and have not been told."""
        for row in list(self._writing):
            self._noted(row)
        return self._rollouts(dict(sorted(self._responses.items())))

    def _submit(self, rows: Ints, begun: Rollouts | None) -> None:
        before = [] if begun is None else [GroupProgress(self._prompts, self._sampling, begun).partial_responses(rows)]
        futures = self._engine.submit(self._samples(rows), self._sampling, *before)
        with self._lock:
            self._writing |= dict(zip(rows.tolist(), futures, strict=True))
        for row, future in zip(rows.tolist(), futures, strict=True):
            future.add_done_callback(partial(self._note, row))

    def _note(self, row: int, done: "Future[Any]") -> None:
        self._ended.put(row)

    def _rollouts(self, responses: Mapping[int, Any]) -> Rollouts | None:
        if not responses:
            return None
        samples = self._samples(np.array(list(responses), np.int64))
        return self._engine.rollouts(samples, list(responses.values()), self._sampling)

    def _samples(self, rows: Ints) -> Prompts:
        prompts, places = np.divmod(rows, self._sampling.group_size)
        samples = self._prompts.take(prompts)
        keys = samples.keys.copy()
        keys[:, 2] += places
        return replace(samples, keys=keys)


def _rows(packed: bytes) -> Ints:
    return np.frombuffer(packed, np.int32).astype(np.int64)
