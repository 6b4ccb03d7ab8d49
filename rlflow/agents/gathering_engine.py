"""Calls that arrive one by one, on an engine that generates a whole batch at a time."""

import threading
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import PartialResponse
from rlflow.engines.serving.sessions import SessionEngine

# How long a batch waits for more calls. Small models need about as long for one token.
_GATHER_S = 0.02
# Nobody plans the memory of these batches: the engine divides them.
_AT_ONCE, _CACHE_TOKENS = 4096, 2**31 - 1


@dataclass(frozen=True)
class _Generated:
    """A response, as a row of a batch."""

    rollouts: Rollouts
    row: int

    @property
    def length(self) -> int:
        return len(self.rollouts.response_ids[self.row])

    is_done = True


class GatheringEngine(SessionEngine):
    """A session engine over one without sessions: calls that arrive within some milliseconds are one batch.

    It cannot stop a response, so that ``abort`` waits for it.
    """

    records = False

    def __init__(self, engine: Any) -> None:
        """Generate by ``engine``, which has a ``tokenizer`` and a ``seed``, as long as others hold it."""
        self._engine = weakref.ref(engine)
        self.tokenizer, self.seed = engine.tokenizer, engine.seed
        self.journal = getattr(engine, "journal", self.journal)
        self._calls: SimpleQueue[_Calls | None] = SimpleQueue()
        self._num_tokens = 0
        weakref.finalize(engine, self._calls.put, None)
        threading.Thread(
            target=_serve, args=(weakref.ref(self), self._calls), name="gathered calls", daemon=True
        ).start()

    @property
    def capacity(self) -> tuple[int, int]:
        return _AT_ONCE, _CACHE_TOKENS

    @property
    def decode_steps(self) -> int:
        return self._num_tokens

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        futures: list[Future[_Generated]] = [Future() for _ in range(len(samples))]
        self._calls.put((samples, replace(sampling, group_size=1), futures))
        return list(futures)

    def abort(self, futures: "Collection[Future[Any]]") -> None:
        wait(futures)

    def rollouts(self, samples: Prompts, responses: Sequence[_Generated], sampling: Sampling) -> Rollouts:
        rows = [response.rollouts.take(np.array([response.row])) for response in responses]
        return Rollouts.concatenate(rows)

    def generate_calls(self, waiting: "Sequence[_Calls]") -> None:
        """Generate calls as few batches, and complete their futures."""
        for sampling in dict.fromkeys(sampling for _, sampling, _ in waiting):
            calls = [(samples, futures) for samples, other, futures in waiting if other == sampling]
            samples = Prompts.concatenate([samples for samples, _ in calls])
            self._generate(samples, sampling, [future for _, futures in calls for future in futures])

    def _generate(self, samples: Prompts, sampling: Sampling, futures: "list[Future[_Generated]]") -> None:
        # Whatever the order of arrival, the same calls are the same batch.
        order = np.lexsort(samples.keys.T[::-1])
        try:
            engine = self._engine()
            assert engine is not None, "the caller that waits holds it"
            rollouts = engine.generate(samples.take(order), sampling)
        except BaseException as error:  # without an answer, callers would wait forever
            for future in futures:
                future.set_exception(error)
            return
        self._num_tokens += int(rollouts.response_ids.lengths.max())
        for row, place in enumerate(order.tolist()):
            futures[place].set_result(_Generated(rollouts, row))


_Calls = tuple[Prompts, Sampling, "list[Future[_Generated]]"]


def _serve(gathering: "weakref.ref[GatheringEngine]", queue: "SimpleQueue[_Calls | None]") -> None:
    """Generate what is asked for until the engine is gone: the work of a thread, which does not hold it."""
    while (calls := queue.get()) is not None:
        waiting = [calls]
        with suppress(Empty):
            while (calls := queue.get(timeout=_GATHER_S)) is not None:
                waiting.append(calls)
        if (alive := gathering()) is None:
            return
        alive.generate_calls(waiting)
        del alive, waiting, calls
