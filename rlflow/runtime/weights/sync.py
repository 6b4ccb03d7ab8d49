"""Weights from the workers of one role to those of another."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from rlflow.engines.base import WeightBackend
from rlflow.errors import EngineError, UserError
from rlflow.runtime.objects.ray_api import wait_all
from rlflow.runtime.ray.actors import Actors, aside
from rlflow.runtime.weights.gpu import Receivers

_ATTEMPTS = 3
# Who does not answer for so long hangs: a bucket takes less than a second, all weights from GPU to GPU seconds.
LIMIT_S = 600.0
# For what answers at once when it lives.
_ANSWER_S = 5.0

Place = tuple[Actors, int]
"""A worker: its role and its rank."""


class NotTakenError(EngineError):
    """A copy of weights that some engines did not take over."""

    def __init__(self, why: str, ranks: Sequence[int]) -> None:
        super().__init__(why)
        self.ranks = ranks


def through_store(source: Actors, target: Actors, version: int) -> float:
    """Copy weights through Ray's store, and again when that fails.

    An engine whose process has ended is replaced at once; one that fails otherwise, before the last attempt. The others
    go on. Raises EngineError, at once where one of ``source`` had to be ended.

    Returns the seconds that the slowest engine took to take them over, waiting aside.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return _bucket_by_bucket(source, target, version)
        except EngineError as error:
            if source.any_ended:
                raise
            broken = target.dead()
            if attempt == _ATTEMPTS - 1 and isinstance(error, NotTakenError):
                broken = sorted({*broken, *error.ranks})
            if broken:
                target.restart(broken)
    return _bucket_by_bucket(source, target, version)


def directly(source: Actors, target: Actors, backend: WeightBackend, version: int) -> float:
    """Copy weights from GPU to GPU by vLLM's own ways, and return the seconds that it took.

    Engines whose process has ended since the last copy are replaced first. A copy that fails is not tried again: the
    failed process has left the others waiting in an exchange. Raises EngineError.
    """
    began = time.perf_counter()
    if dead := target.dead():
        target.restart(dead)
    if not target.met:
        _within(_called(source, source.everywhere("forget_receivers")))
        target.met = True
    receivers = Receivers(target.actors, target.num_gpus_each)
    calls = [source.call(rank, "send_directly", backend, receivers, rank, source.address) for rank in _ranks(source)]
    sending = _called(source, calls)
    _within(sending, receiving=target)
    _within(_called(target, target.everywhere("call", "finish_transfer", version)))
    return time.perf_counter() - began


def _bucket_by_bucket(source: Actors, target: Actors, version: int) -> float:
    """One is taken over while the next is gathered. Every engine has ended, well or not, when this returns."""
    calls = [source.call(rank, "send_weights", rank == 0) for rank in _ranks(source)]
    _within(_called(source, calls) | _called(target, target.everywhere("expect_weights")))
    takes: list[Future[float]] = target.everywhere("take_weights", version)
    ending: str | None = None
    try:
        offers: list[Future[None]] = []
        while (bucket := _next_bucket(source)) is not None:
            _within(_called(target, offers))
            if any(take.done() for take in takes):
                ending = "another engine has not taken the weights over"
                break
            offers = target.everywhere("offer", bucket)
        _within(_called(target, offers))
    except (EngineError, UserError) as error:
        ending = str(error)
    target.everywhere("offer", ending)
    late = wait(takes, timeout=LIMIT_S).not_done
    if late:
        _end([(target, rank) for rank, take in enumerate(takes) if take in late])
    errors = {rank: take.exception() for rank, take in enumerate(takes)}
    failed = {rank: error for rank, error in errors.items() if error is not None and str(error) != ending}
    if failed:
        first = next(iter(failed.values()))
        raise NotTakenError(str(first), list(failed)) if isinstance(first, EngineError) else first
    own: list[float] = wait_all(takes)
    return max(own)


def _next_bucket(source: Actors) -> Any | None:
    """Ray's reference to it; None after the last. Every rank gathers it, and the first one has it."""
    references = [actor.next_bucket.options(num_returns=2).remote() for actor in source.actors]
    more = _within(_called(source, [source.told(there, rank) for rank, (_, there) in enumerate(references)]))[0]
    return references[0][0] if more else None


def _ranks(actors: Actors) -> range:
    return range(len(actors))


def _called(actors: Actors, calls: "Sequence[Future[Any]]") -> "dict[Future[Any], Place]":
    """``calls`` are one a rank."""
    return {call: (actors, rank) for rank, call in enumerate(calls)}


def _within(calls: "Mapping[Future[Any], Place]", receiving: Actors | None = None) -> list[Any]:
    """As gathered. Those that do not answer in time are ended, and so are those that are ``receiving`` then: raises
    EngineError, which names them."""
    done, late = wait(calls, timeout=LIMIT_S, return_when=FIRST_EXCEPTION)
    if late and not any(call.exception() for call in done):
        _end([calls[call] for call in calls if call in late] + (_at_work(receiving) if receiving else []))
    return wait_all(list(calls))


def _at_work(actors: Actors) -> list[Place]:
    """Those whose engines are in a call, or that do not say."""
    asked = [aside(actor, "under_way") for actor in actors.actors]
    wait(asked, timeout=_ANSWER_S)
    busy = [not answer.done() or answer.exception() is not None or answer.result() != [] for answer in asked]
    return [(actors, rank) for rank in _ranks(actors) if busy[rank]]


def _end(silent: Sequence[Place]) -> None:
    """Raises EngineError."""
    for actors, rank in silent:
        actors.end(actors.actors[rank], f"has not answered for {LIMIT_S:g} s in a copy of weights")
    who = "; ".join(actors.name(rank) for actors, rank in silent)
    raise EngineError(f"a copy of weights has stood still for {LIMIT_S:g} s. No answer from {who}.")
