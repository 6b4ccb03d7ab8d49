"""Engines without a model that take as long as planned: one generates token by token, one trains."""

import heapq
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Metrics, Minibatch, Packed, Prompts, Repeated, Rollouts
from rlflow.engines.base import EngineSpec, Sampling, TokenLoss, sample_seed
from rlflow.engines.fake import FakeEngine
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse, prepend_partial
from rlflow.engines.serving.activity import EngineActivity
from rlflow.engines.serving.sessions import SessionEngine
from rlflow.resources.time.lengths import Lengths
from rlflow.runtime.ray.worker import EngineWorker

MEAN, LIMIT = 200, 1000
LENGTHS = Lengths.log_normal(MEAN, LIMIT).values
# Samples that an engine generates at once, the seconds of a decoding step, and those that each running sample adds.
SLOTS, STEP_S, EACH_S = 64, 5.0e-3, 5.0e-5
# Seconds of an optimizer step.
TRAIN_S = 4.0


def token_seconds(running: float) -> float:
    """Return the seconds of a decoding step of one engine."""
    return STEP_S + EACH_S * running


def response_tokens(lengths: Sequence[float], seed: int, key: NDArray[np.int64]) -> int:
    """Return the length of a sample's response."""
    return int(np.ceil(np.random.default_rng(sample_seed(seed, key)).choice(lengths)))


class _Response:
    """One response: its tokens so far follow from the clock of decoding steps."""

    def __init__(self, length: int, partial: PartialResponse, version: int) -> None:
        self.future: Future[Any] = Future()
        self.partial, self.version = partial, version
        self.left = length - len(partial.ids)
        self.began: float | None = None
        self.length, self.is_done = len(partial.ids), False

    def end(self, tokens: int) -> None:
        """Complete the future with this many new tokens."""
        self.length = len(self.partial.ids) + tokens
        self.is_done = tokens >= self.left
        self.future.set_result(self)


class PacedGenerator(SessionEngine, FakeEngine):
    """An engine whose responses have lengths of a long-tailed distribution, and take the time of their decoding steps.

    The time that has passed decides how far it is, so a slow machine makes no response longer.
    """

    lengths: ClassVar[Sequence[float]] = LENGTHS
    """The lengths of responses, each equally likely."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._changed = threading.Condition()
        self._clock, self._at = 0.0, time.perf_counter()
        self._running: list[tuple[float, int, _Response]] = []
        self._waiting: deque[_Response] = deque()
        self._number = 0
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def capacity(self) -> tuple[int, int]:
        return SLOTS, 2**40

    @property
    def decode_steps(self) -> int:
        with self._changed:
            self._run_to_now()
            return int(self._clock)

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        with self._changed:
            self._run_to_now()
            new = []
            for key, before in zip(samples.keys, partial or [NO_RESPONSE] * len(samples), strict=True):
                length = min(sampling.max_tokens, response_tokens(self.lengths, self._spec.seed, key))
                new.append(_Response(length, before, self._version or 0))
            self._waiting.extend(new)
            self._fill()
            self._changed.notify_all()
        return [response.future for response in new]

    def abort(self, futures: "Collection[Future[Any]]") -> None:
        with self._changed:
            self._run_to_now()
            aborted = set(futures)
            for _, _, response in self._running:
                if response.future in aborted:
                    response.end(int(self._clock - (response.began or 0.0)))
            for response in self._waiting:
                if response.future in aborted:
                    response.end(0)
            self._running = [each for each in self._running if each[2].future not in aborted]
            heapq.heapify(self._running)
            self._waiting = deque(each for each in self._waiting if each.future not in aborted)
            self._fill()
            self._changed.notify_all()

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        lengths = np.array([each.length - len(each.partial.ids) for each in responses])
        ids = Packed.from_rows([np.ones(length, np.int32) for length in lengths], np.int32)
        versions = Repeated(np.array([each.version for each in responses], np.int32), lengths)
        columns = prepend_partial([each.partial for each in responses], ids, self._logprobs(ids), versions)
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=columns[0],
            logprobs=columns[1],
            versions=columns[2],
            finished=np.array([each.is_done and each.length < sampling.max_tokens for each in responses]),
            temperature=1.0,
            texts=("",) * len(samples),
            rows=samples.rows,
        )

    def take_activity(self) -> list[EngineActivity]:
        return []

    def _serve(self) -> None:
        with self._changed:
            while True:
                self._run_to_now()
                if self._running:
                    self._changed.wait((self._running[0][0] - self._clock) * token_seconds(len(self._running)))
                else:
                    self._changed.wait()

    def _run_to_now(self) -> None:
        """Complete the responses that have ended by now, each at its own time."""
        now = time.perf_counter()
        while self._running:
            each = token_seconds(len(self._running))
            end = self._at + (self._running[0][0] - self._clock) * each
            if end > now:
                self._clock += (now - self._at) / each
                break
            self._at, self._clock = end, self._running[0][0]
            response = heapq.heappop(self._running)[2]
            response.end(response.left)
            self._fill()
        self._at = now

    def _fill(self) -> None:
        while self._waiting and len(self._running) < SLOTS:
            response = self._waiting.popleft()
            response.began = self._clock
            self._number += 1
            heapq.heappush(self._running, (self._clock + response.left, self._number, response))


class PacedTrainer(FakeEngine):
    """An engine whose optimizer steps take ``TRAIN_S``."""

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        start = time.perf_counter()
        metrics = super().update(minibatch, loss)
        time.sleep(max(0.0, start + TRAIN_S - time.perf_counter()))
        return metrics


class PacedWorker(EngineWorker):
    """A worker process with one of these engines."""

    generator: ClassVar[type[PacedGenerator]] = PacedGenerator

    def build(self, engine: str, spec: EngineSpec) -> None:
        from rlflow.engines.memory import PhasePeaks

        self._engine: Any = self.generator(spec) if "Generates" in spec.capabilities else PacedTrainer(spec)
        if "Generates" in spec.capabilities:
            self._engine_thread = None
        self._peaks = PhasePeaks(spec.device)
