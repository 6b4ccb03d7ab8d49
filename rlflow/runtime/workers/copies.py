"""Weights from the workers of one role to those of another."""

import time
from concurrent.futures import Future, wait
from typing import Any

from rlflow.engines.base import WeightBackend
from rlflow.errors import EngineError, UserError
from rlflow.runtime.workers.actors import Actors
from rlflow.runtime.workers.gpu_weights import Receivers
from rlflow.runtime.workers.proxies import gathered

_ATTEMPTS = 3


def through_store(source: Actors, target: Actors, version: int) -> float:
    """Through Ray's store: tried again when it fails, and the last time with new engines. Raises EngineError.

    Returns the seconds that the slowest engine took to take them over, waiting aside.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return _bucket_by_bucket(source, target, version)
        except EngineError:
            if attempt == _ATTEMPTS - 1:
                target.restart()
    return _bucket_by_bucket(source, target, version)


def directly(source: Actors, target: Actors, backend: WeightBackend, version: int) -> float:
    """From GPU to GPU, by vLLM's own ways. Returns the seconds that it took.

    It is not tried again: who failed has left the others waiting in an exchange. Raises EngineError.
    """
    began = time.perf_counter()
    if not target.met:
        gathered(source.everywhere("forget_receivers"))
        target.met = True
    receivers = Receivers(target.actors, target.num_gpus_each)
    address = source.meeting_address()
    ranks = range(len(source))
    gathered([source.call(rank, "send_directly", backend, receivers, rank, address) for rank in ranks])
    gathered(target.everywhere("call", "transferred", version))
    return time.perf_counter() - began


def _bucket_by_bucket(source: Actors, target: Actors, version: int) -> float:
    """One is taken over while the next is gathered. Every engine has ended, well or not, when this returns."""
    calls = [source.call(rank, "send_weights", rank == 0) for rank in range(len(source))]
    gathered(calls + target.everywhere("expect_weights"))
    takes: list[Future[float]] = target.everywhere("take_weights", version)
    ending: str | None = None
    try:
        offers: list[Future[None]] = []
        while (bucket := _next_bucket(source)) is not None:
            gathered(offers)
            if any(take.done() for take in takes):
                ending = "another engine has not taken the weights over"
                break
            offers = target.everywhere("offer", bucket)
        gathered(offers)
    except (EngineError, UserError) as error:
        ending = str(error)
    target.everywhere("offer", ending)
    wait(takes)
    first = next((take.exception() for take in takes if take.exception() and str(take.exception()) != ending), None)
    if first is not None:
        raise first
    own: list[float] = gathered(takes)
    return max(own)


def _next_bucket(source: Actors) -> Any | None:
    """Ray's reference to it; None after the last. Every rank gathers it, and the first one has it."""
    references = [actor.next_bucket.options(num_returns=2).remote() for actor in source.actors]
    more = gathered([source.told(there, rank) for rank, (_, there) in enumerate(references)])[0]
    return references[0][0] if more else None
