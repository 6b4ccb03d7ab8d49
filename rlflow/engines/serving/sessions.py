"""Generation sample by sample: the runtime hands an engine samples while it generates, and learns which are done.

A session is one generation over some prompts. The runtime starts rows whenever the engine has room, waits for some to
be done, and may preempt others, which another engine then resumes.

Shapes: P prompts, G group size, R rows; row ``prompt * G + sample``. Rows and lengths travel as bytes of int32, which
are smaller than pickled lists.

Finished responses are recorded in the run's journal, and responses that are recorded already are done at once.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial as bind
from queue import Empty, Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling, Turns
from rlflow.engines.group_progress import GroupProgress, PartialResponse
from rlflow.engines.journal import Journal

Ints = NDArray[np.int64]

# The longest time without a report, as long as the runtime may hand the engine more rows.
_REPORT_S = 1.0
# The time between two reports of all engines of a generation together, at least, so that the runtime keeps up with many
# engines. It takes the runtime about half of that to answer one.
_REPORT_EACH_S = 2e-3
# A row number that stands for no row, to wake up a thread that waits for one.
_NO_ROW = -1

WAITING_PER_SEQUENCE = 16
"""Samples that may wait for something else than the engine, for each that it can generate at once: they need room in
its cache alone."""


@dataclass(frozen=True)
class SampleProgress:
    """The samples that an engine has completed since its last report."""

    rows: bytes
    """The rows that are done."""
    lengths: bytes
    """The number of response tokens of each of these rows."""
    decode_steps: int
    """The number of tokens that the engine has generated in this session for a sample that was there all the time."""


class SessionEngine(ABC):
    """A base class for engines that take new samples while they generate; several threads may call its methods."""

    journal: Journal = Journal(None, "")
    """The journal of the run; engines without one record nothing."""
    records: bool = True
    """It writes to its journal. An engine over another one may leave that to it."""
    seed: int = 0
    """The seed of the run."""
    _session: "_Session | None" = None
    _conversing: "tuple[tuple[Turns, SessionEngine], ...]" = ()
    """The engines of conversations over this one."""
    _num_finished: int = 0
    """The number of sessions that have ended with all of their samples; recorded ones need no decode step."""

    @property
    @abstractmethod
    def capacity(self) -> tuple[int, int]:
        """Return the number of samples it generates at the same time, and the number of tokens its KV cache holds."""

    @property
    @abstractmethod
    def decode_steps(self) -> int:
        """Return the decode steps since the engine was built, counted as in ``SampleProgress``."""

    @property
    def progress(self) -> int:
        """Return a number that changes as long as the engine's samples make progress."""
        return self.decode_steps + self._num_finished + sum(engine.progress for _, engine in self._conversing)

    @abstractmethod
    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        """Start one response to each sample, whatever the group size; return a future for each. Raises EngineError.

        ``partial`` holds what is already generated of each response. A response has a ``length``, which includes that,
        and ``is_done``, which is False if it was aborted.
        """

    @abstractmethod
    def abort(self, futures: "Collection[Future[Any]]") -> None:
        """End the responses of these futures where they are. Returns when the futures have completed."""

    @abstractmethod
    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        """Return the rollouts of samples with their responses."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Return ``group_size`` rollouts of each prompt, without a session. Raises EngineError."""
        engine, samples = self._engine_of(sampling), prompts.repeat(sampling.group_size)
        return engine.rollouts(samples, [future.result() for future in engine.submit(samples, sampling)], sampling)

    def interrupted_rows(self, prompts: Prompts, group_size: int) -> Ints:
        """Return the rows whose interrupted responses only it continues where they are; by default none."""
        return np.zeros(0, np.int64)

    def begin_session(self, prompts: Prompts, sampling: Sampling, num_engines: int = 1) -> tuple[int, int, bytes]:
        """Begin a session, which replaces the one before; return the capacity for its samples, and those interrupted.

        The more engines take part in the generation, the longer each collects the rows of a report.
        """
        engine = self._engine_of(sampling)
        self._session = _Session(engine, self.journal, prompts, sampling, num_engines)
        return *engine.capacity, pack_rows(engine.interrupted_rows(prompts, sampling.group_size).tolist())

    def advance(self, rows: bytes, num_done: int, partial: Rollouts | None = None) -> SampleProgress:
        """Start these rows, or resume those that are in ``partial``, and report the rows that are done.

        Returns when ``num_done`` rows are done, or all of them, or after a second. All rows that are done by then are
        reported. Raises EngineError.
        """
        assert self._session is not None
        return self._session.advance(_unpack(rows), num_done, partial)

    def preempt(self, rows: bytes) -> Rollouts | None:
        """Stop generating these rows, unless they are done, and forget them; return what is generated, ascending.

        Returns None if all of them are done. Raises EngineError.
        """
        assert self._session is not None
        return self._session.preempt(_unpack(rows))

    def take_rollouts(self, rows: bytes) -> Rollouts:
        """Return the rollouts of these rows, ascending, before the session ends; they must be reported as done."""
        assert self._session is not None
        return self._session.take(_unpack(rows))

    def finish_session(self) -> Rollouts | None:
        """End the session, and return all rollouts that were not taken, ascending; None if there are none."""
        assert self._session is not None
        session, self._session = self._session, None
        rollouts = session.take_all()
        self._num_finished += 1
        return rollouts

    def _engine_of(self, sampling: Sampling) -> "SessionEngine":
        """Return the engine that generates such responses: this one, or one of conversations over it."""
        if sampling.turns is None:
            return self
        for turns, engine in self._conversing:
            if turns == sampling.turns:
                return engine
        conversing: SessionEngine = sampling.turns.session_engine(self)
        self._conversing = (*self._conversing, (sampling.turns, conversing))
        return conversing


class _Session:
    """The rows of one generation: which are being generated, and which are done."""

    def __init__(
        self, engine: SessionEngine, journal: Journal, prompts: Prompts, sampling: Sampling, num_engines: int = 1
    ) -> None:
        self._engine, self._prompts, self._sampling = engine, prompts, sampling
        self._journal, self._recorded = journal, journal.recorded(prompts.keys)
        self._report_every_s, self._next_report = _REPORT_EACH_S * num_engines, 0.0
        self._lock = threading.Lock()
        self._generating: dict[int, Future[Any]] = {}
        self._completed: Queue[int] = Queue()
        """Rows whose futures have completed, some of them by an abort. No SimpleQueue: several threads wait here with a
        timeout, and in one whose row another has taken, CPython 3.11 may wait forever."""
        self._responses: dict[int, Any] = {}
        """The responses of rows that are done and in no batch yet."""
        self._done: dict[int, tuple[Rollouts, int]] = {}
        """The batch that a done row is in, and its place there."""
        self._batching = threading.Lock()
        self._steps_before = engine.decode_steps

    def advance(self, rows: Ints, num_done: int, partial: Rollouts | None = None) -> SampleProgress:
        done = self._submit(rows, partial) if len(rows) else {}
        deadline = time.monotonic() + _REPORT_S
        while self._generating:
            until = self._next_report if num_done <= len(done) else deadline
            try:
                done |= self._collect(self._completed.get(timeout=max(0.0, until - time.monotonic())))
            except Empty:
                break
        self._batch_responses()
        self._next_report = time.monotonic() + self._report_every_s
        steps = self._engine.decode_steps - self._steps_before
        return SampleProgress(pack_rows(list(done)), pack_rows(list(done.values())), steps)

    def preempt(self, rows: Ints) -> Rollouts | None:
        with self._lock:
            futures = {row: self._generating[row] for row in sorted(rows.tolist()) if row in self._generating}
        self._engine.abort(list(futures.values()))
        aborted = {row: future.result() for row, future in futures.items() if not future.result().is_done}
        with self._lock:
            for row in aborted:
                del self._generating[row]
        # A thread in ``advance`` may wait for these rows alone.
        self._completed.put(_NO_ROW)
        return self._build_rollouts(aborted) if aborted else None

    def take(self, rows: Ints) -> Rollouts:
        rollouts = self._take(sorted(rows.tolist()))
        assert rollouts is not None
        return rollouts

    def take_all(self) -> Rollouts | None:
        """Return all rollouts that are done, including those that were never reported."""
        for row in list(self._generating):
            self._collect(row)
        self._batch_responses()
        return self._take(sorted(self._done))

    def _submit(self, rows: Ints, partial: Rollouts | None) -> dict[int, int]:
        """Start or resume rows. Return those whose responses are recorded, with their lengths."""
        samples, done = self._samples(rows), {}
        recorded_rows, recorded = self._recorded.find(samples, self._sampling)
        if recorded is not None:
            done = dict(zip(rows[recorded_rows].tolist(), recorded.response_ids.lengths.tolist(), strict=True))
            self._done |= {row: (recorded, place) for place, row in enumerate(done)}
            missing = np.delete(np.arange(len(rows)), recorded_rows)
            rows, samples = rows[missing], samples.take(missing)
            if not len(rows):
                return done
        before = (
            None if partial is None else GroupProgress(self._prompts, self._sampling, partial).partial_responses(rows)
        )
        futures = self._engine.submit(samples, self._sampling, before)
        with self._lock:
            self._generating |= dict(zip(rows.tolist(), futures, strict=True))
        for row, future in zip(rows.tolist(), futures, strict=True):
            future.add_done_callback(bind(self._note_completed, row))
        return done

    def _note_completed(self, row: int, future: "Future[Any]") -> None:
        self._completed.put(row)

    def _collect(self, row: int) -> dict[int, int]:
        """Return the row with its length if it is done, else nothing. Raises the error that its generation raised."""
        with self._lock:
            future = self._generating.get(row)
            if future is None or not future.done() or not future.result().is_done:
                return {}
            self._responses[row] = response = self._generating.pop(row).result()
            return {row: response.length}

    def _batch_responses(self) -> None:
        """Build and record the rollouts of all rows that are done and in no batch yet."""
        with self._batching:
            with self._lock:
                responses, self._responses = dict(sorted(self._responses.items())), {}
            if responses:
                batch = self._build_rollouts(responses)
                self._journal.add(batch, self._samples(np.array(list(responses), np.int64)), self._sampling)
                self._done |= {row: (batch, place) for place, row in enumerate(responses)}

    def _build_rollouts(self, responses: Mapping[int, Any]) -> Rollouts:
        samples = self._samples(np.array(list(responses), np.int64))
        return self._engine.rollouts(samples, list(responses.values()), self._sampling)

    def _take(self, rows: Sequence[int]) -> Rollouts | None:
        """Return the rollouts of rows that are done, in this order, and forget them."""
        places: dict[int, tuple[Rollouts, list[int], list[int]]] = {}
        for number, row in enumerate(rows):
            batch, place = self._done.pop(row)
            _, its_places, numbers = places.setdefault(id(batch), (batch, [], []))
            its_places.append(place)
            numbers.append(number)
        if not places:
            return None
        parts = [batch.take(np.array(its_places)) for batch, its_places, _ in places.values()]
        order = np.argsort(np.concatenate([numbers for *_, numbers in places.values()]))
        return Rollouts.concatenate(parts).take(order)

    def _samples(self, rows: Ints) -> Prompts:
        """Return the prompt of each row, with the row's key."""
        prompts, numbers = np.divmod(rows, self._sampling.group_size)
        samples = self._prompts.take(prompts)
        keys = samples.keys.copy()
        keys[:, 2] += numbers
        return replace(samples, keys=keys)


def pack_rows(rows: Sequence[int]) -> bytes:
    """Return row numbers as bytes for a message."""
    return np.array(rows, np.int32).tobytes()


def _unpack(rows: bytes) -> Ints:
    return np.frombuffer(rows, np.int32).astype(np.int64)
