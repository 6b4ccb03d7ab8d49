"""An engine whose responses are known beforehand, and that writes them token by token when it is asked."""

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Prompts, Rollouts
from rlflow.engines.base import EngineSpec, Sampling, sample_seed
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse, prepend_partial
from rlflow.engines.serving.sessions import SampleProgress
from rlflow.errors import EngineError
from tests.helpers import WritingEngine

MAX_TOKENS = 40


def response(key: NDArray[np.int64]) -> list[int]:
    """Return as many tokens as are allowed, or fewer of which the last is 0."""
    draw = np.random.default_rng(sample_seed(0, key))
    length = 1 + int(draw.exponential(8))
    ids = draw.integers(1, 10, length).tolist()
    return ([*ids[:-1], 0] if length <= MAX_TOKENS else ids)[:MAX_TOKENS]


class Stepwise(WritingEngine):
    """Writes a token of each sample that it has until enough are done, whenever it is given some or is asked."""

    def __init__(self, given: EngineSpec, room: tuple[int, int] = (16, 10_000)) -> None:
        super().__init__(given, room)
        self.begun: list[tuple[list[int], int]] = []
        self._live: list[tuple[Future[Any], Any]] = []
        self._lock = threading.Lock()
        self._enough = 1

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        answers: list[Future[Any]] = []
        for key, before in zip(samples.keys, partial or [NO_RESPONSE] * len(samples), strict=True):
            left = response(key)
            assert left[: len(before.ids)] == before.ids.tolist()
            del left[: len(before.ids)]
            self.begun.append((key.tolist(), len(before.ids)))
            answers.append(Future())
            written = SimpleNamespace(left=left, ids=[], partial=before, version=self._version, length=len(before.ids))
            written.is_done = False
            self._live.append((answers[-1], written))
        self._go_on()
        return answers

    def advance(self, rows: bytes, enough: int, begun: Rollouts | None = None) -> SampleProgress:
        self._enough = enough
        if not rows:
            self._go_on()
        return super().advance(rows, enough, begun)

    def _go_on(self) -> None:
        assert self._session is not None
        finished: list[tuple[Future[Any], Any]] = []
        with self._lock:
            if any(answer.done() for answer in list(self._session._generating.values())):
                return  # which has not been told
            while self._live and len(finished) < self._enough:
                self._steps += 1
                for _, written in self._live:
                    written.ids.append(written.left.pop(0))
                    written.length += 1
                    written.is_done = not written.left
                finished += [each for each in self._live if each[1].is_done]
                self._live = [each for each in self._live if not each[1].is_done]
        for answer, written in finished:
            answer.set_result(written)

    def abort(self, answers: "Collection[Future[Any]]") -> None:
        with self._lock:
            broken = [each for each in self._live if each[0] in answers]
            self._live = [each for each in self._live if each[0] not in answers]
        for answer, written in broken:
            answer.set_result(written)

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        ids = Packed.from_rows([each.ids for each in responses], np.int32)
        versions = Packed.from_rows([np.full(len(each.ids), each.version) for each in responses], np.int32)
        before = [each.partial for each in responses]
        columns = prepend_partial(before, ids, ids.like(-versions.values.astype(np.float32)), versions)
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=columns[0],
            logprobs=columns[1],
            versions=columns[2],
            temperature=1.0,
            finished=np.array([columns[0][row].tolist()[-1:] == [0] for row in range(len(samples))]),
            texts=tuple(str(columns[0][row].tolist()) for row in range(len(samples))),
            rows=samples.rows,
        )


class Dying(Stepwise):
    """Fails when it is to tell for the ``at``-th time what it has done, to put samples off or hand them over, or at its
    end."""

    at = 3
    when = "advance"

    def _fail(self, when: str) -> None:
        if when == self.when:
            self.at -= 1
            if self.at <= 0:
                raise EngineError("it died")

    def advance(self, rows: bytes, enough: int, begun: Rollouts | None = None) -> SampleProgress:
        self._fail("advance")
        return super().advance(rows, enough, begun)

    def preempt(self, rows: bytes) -> Rollouts | None:
        self._fail("preempt")
        return super().preempt(rows)

    def take_rollouts(self, rows: bytes) -> Rollouts:
        self._fail("take_rollouts")
        return super().take_rollouts(rows)

    def finish_session(self) -> Rollouts | None:
        self._fail("finish_session")
        return super().finish_session()
