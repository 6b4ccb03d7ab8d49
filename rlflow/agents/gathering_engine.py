"""Calls that arrive one by one, on an engine that generates a whole batch at a time."""

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
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

    def __init__(self, engine: Any) -> None:
        """Generate by ``engine``, which has a ``tokenizer`` and a ``seed``, in a thread that ends with the process."""
        self._engine = engine
        self.tokenizer, self.seed = engine.tokenizer, engine.seed
        self._calls: SimpleQueue[tuple[Prompts, Sampling, list[Future[_Generated]]]] = SimpleQueue()
        self._num_tokens = 0
        threading.Thread(target=self._serve, name="gathered calls", daemon=True).start()

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

    def _serve(self) -> None:
        while True:
            waiting = [self._calls.get()]
            try:
                while True:
                    waiting.append(self._calls.get(timeout=_GATHER_S))
            except Empty:
                pass
            for sampling in dict.fromkeys(sampling for _, sampling, _ in waiting):
                calls = [(samples, futures) for samples, other, futures in waiting if other == sampling]
                samples = Prompts.concatenate([samples for samples, _ in calls])
                self._generate(samples, sampling, [future for _, futures in calls for future in futures])

    def _generate(self, samples: Prompts, sampling: Sampling, futures: "list[Future[_Generated]]") -> None:
        # Whatever the order of arrival, the same calls are the same batch.
        order = np.lexsort(samples.keys.T[::-1])
        try:
            rollouts = self._engine.generate(samples.take(order), sampling)
        except BaseException as error:  # without an answer, callers would wait forever
            for future in futures:
                future.set_exception(error)
            return
        self._num_tokens += int(rollouts.response_ids.lengths.max())
        for row, place in enumerate(order.tolist()):
            futures[place].set_result(_Generated(rollouts, row))
