"""Generates the calls of episodes, or finds them in the journal."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Prompts, Rollouts
from rlflow.batch.routing import pack_routing
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import PartialResponse
from rlflow.engines.serving.sessions import SessionEngine
from rlflow.environments.transcript import piece_of


@dataclass(frozen=True)
class CallRequest:
    """A call that an engine shall generate."""

    key: NDArray[np.int64]
    """[3]: the key that its random numbers follow from."""
    prompt_ids: NDArray[np.int32]
    partial: PartialResponse
    """The tokens that are generated already."""
    sampling: Sampling
    num_routed: int = 0
    """The first tokens of the prompt whose experts are known from an earlier call."""


@dataclass(frozen=True)
class CallResult:
    """The reply to a call, done or not."""

    reply: PartialResponse
    finished: bool
    """It ended with an end token."""
    is_done: bool
    """False for a call that was aborted."""
    text: str


class CallGenerator:
    """The calls of one engine. One thread calls its methods."""

    def __init__(self, engine: SessionEngine) -> None:
        self._engine = engine

    def submit(self, requests: Sequence[CallRequest]) -> "list[Future[Any]]":
        """Start these calls; ``results`` reads the futures. Raises EngineError."""
        futures: dict[int, Future[Any]] = {}
        for sampling, rows in _by_sampling(requests).items():
            prompts = _prompts([requests[row] for row in rows])
            recorded_rows, recorded = self._engine.journal.recorded(prompts.keys).find(prompts, sampling)
            if recorded is not None:
                for place, result in zip(recorded_rows.tolist(), _results(recorded), strict=True):
                    futures[rows[place]] = Future()
                    futures[rows[place]].set_result(result)
            missing = [place for place in range(len(rows)) if rows[place] not in futures]
            if missing:
                partial = [requests[rows[place]].partial for place in missing]
                resumes = any(len(reply.ids) for reply in partial)
                started = self._engine.submit(prompts.take(np.array(missing)), sampling, partial if resumes else None)
                futures |= {rows[place]: future for place, future in zip(missing, started, strict=True)}
        return [futures[row] for row in range(len(requests))]

    def results(self, requests: Sequence[CallRequest], futures: "Sequence[Future[Any]]") -> list[CallResult]:
        """Return the results of futures that are done, and record them in the journal. Raises EngineError."""
        results: dict[int, CallResult] = {}
        for sampling, rows in _by_sampling(requests).items():
            responses = {row: futures[row].result() for row in rows}
            results |= {row: response for row, response in responses.items() if isinstance(response, CallResult)}
            new = [row for row in rows if row not in results]
            if not new:
                continue
            prompts = _prompts([requests[row] for row in new])
            rollouts = self._engine.rollouts(prompts, [responses[row] for row in new], sampling)
            rollouts = _without_known_routing(rollouts, [requests[row].num_routed for row in new])
            is_done = [responses[row].is_done for row in new]
            results |= dict(zip(new, _results(rollouts, is_done), strict=True))
            done = np.flatnonzero(is_done)
            if len(done) and self._engine.records:
                self._engine.journal.add(rollouts.take(done), prompts.take(done), sampling)
        return [results[row] for row in range(len(requests))]


def _by_sampling(requests: Sequence[CallRequest]) -> dict[Sampling, list[int]]:
    rows = defaultdict(list)
    for row, request in enumerate(requests):
        rows[request.sampling].append(row)
    return rows


def _prompts(requests: Sequence[CallRequest]) -> Prompts:
    return Prompts(
        keys=np.stack([request.key for request in requests]),
        ids=Packed.from_rows([request.prompt_ids for request in requests], np.int32),
        rows=({},) * len(requests),
    )


def _without_known_routing(rollouts: Rollouts, num_known: Sequence[int]) -> Rollouts:
    """Return the rollouts without the experts of the first tokens: a long history is in the prompts of many calls."""
    routing = rollouts.routing
    if routing is None:
        return rollouts
    return replace(rollouts, routing=pack_routing([routing[row][number:] for row, number in enumerate(num_known)]))


def _results(rollouts: Rollouts, is_done: Sequence[bool] | None = None) -> list[CallResult]:
    return [
        CallResult(
            piece_of(rollouts, row),
            bool(rollouts.finished[row]),
            is_done is None or is_done[row],
            rollouts.texts[row],
        )
        for row in range(len(rollouts))
    ]
