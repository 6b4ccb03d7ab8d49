"""Generation over several engines: each takes a request when it has room for it."""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

import numpy as np

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.runtime.parts import Whole


class Engines(Protocol):
    """The workers of a role, by rank."""

    def __len__(self) -> int: ...

    def submit(self, rank: int, method: str, *arguments: Any) -> "Future[Any]": ...


def pulled(engines: Engines, prompts: Prompts, sampling: Sampling, room: int) -> Rollouts:
    """Each prompt goes to an engine when that has room, for ``room`` responses at once: none waits behind the long
    responses of another.

    One prompt more than there is room for lies ready at each, so that none runs dry meanwhile.
    """
    free = dict.fromkeys(range(len(engines)), room // sampling.group_size + 1)
    whole = Whole(prompts)
    running: dict[Future[Any], tuple[int, int]] = {}
    written: dict[int, Rollouts] = {}
    waiting = iter(range(len(prompts)))
    prompt = next(waiting, None)
    while prompt is not None or running:
        while prompt is not None and max(free.values()):
            rank = max(free, key=lambda each: free[each])
            free[rank] -= 1
            part = whole.part(np.array([prompt]))
            running[engines.submit(rank, "generate", part, sampling)] = (rank, prompt)
            prompt = next(waiting, None)
        for call in wait(running, return_when=FIRST_COMPLETED).done:
            rank, done = running.pop(call)
            free[rank] += 1
            written[done] = call.result()
    return Rollouts.joined([written[index] for index in range(len(prompts))])
