"""Schedules of conversations without any overhead: what engines of known speed and known delays allow."""

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def simulate(
    tokens: Floats, delays: Floats, engines: int, slots: int, token_seconds: Callable[[float], float]
) -> float:
    """Return the seconds until all conversations have ended, by brute force.

    A turn starts at once on any engine with a free slot, else it waits, first come first served. ``tokens`` [C, K] are
    those of K turns of C conversations, and ``delays`` [C, K] the seconds of the answers. All slots of an engine make a
    token in ``token_seconds`` of the number that are used.
    """
    clock, updated = [0.0] * engines, [0.0] * engines
    running: list[list[tuple[float, int, int]]] = [[] for _ in range(engines)]
    """The conversations of each engine with the clock at their end: a heap."""
    waiting: deque[tuple[int, int]] = deque()
    arriving = [(0.0, row, 0) for row in range(len(tokens))]
    now = last_answer = 0.0

    def advance(engine: int) -> None:
        if running[engine]:
            clock[engine] += (now - updated[engine]) / token_seconds(len(running[engine]))
        updated[engine] = now

    def start(engine: int, row: int, turn: int) -> None:
        heapq.heappush(running[engine], (clock[engine] + tokens[row, turn], row, turn))

    while arriving or any(running):
        ends = [
            (updated[engine] + max(0.0, rows[0][0] - clock[engine]) * token_seconds(len(rows)), engine)
            for engine, rows in enumerate(running)
            if rows
        ]
        end, engine = min(ends, default=(np.inf, 0))
        if arriving and arriving[0][0] <= end:
            now, row, turn = heapq.heappop(arriving)
            engine = min(range(engines), key=lambda each: len(running[each]))
            if len(running[engine]) == slots:
                waiting.append((row, turn))
            else:
                advance(engine)
                start(engine, row, turn)
            continue
        now = end
        advance(engine)
        _, row, turn = heapq.heappop(running[engine])
        answered = now + float(delays[row, turn])
        last_answer = max(last_answer, answered)
        if turn + 1 < tokens.shape[1]:
            heapq.heappush(arriving, (answered, row, turn + 1))
        if waiting:
            start(engine, *waiting.popleft())
    return last_answer


def lock_step(
    tokens: Floats, delays: Floats, engines: int, slots: int, token_seconds: Callable[[float], float]
) -> float:
    """Return the seconds where every turn waits for the turns and the answers of all conversations."""
    turns, none = range(tokens.shape[1]), np.zeros((len(tokens), 1))
    generation = (simulate(tokens[:, [turn]], none, engines, slots, token_seconds) for turn in turns)
    return sum(generation) + float(delays.max(axis=0).sum())


def bound(tokens: Floats, delays: Floats, engines: int, slots: int, token_seconds: Callable[[float], float]) -> float:
    """Return the seconds that no schedule can beat: all slots always in use, or the longest conversation alone."""
    work = float(tokens.sum()) / (engines * slots) * token_seconds(slots)
    alone = (tokens * token_seconds(1) + delays).sum(axis=1)
    return max(work, float(alone.max()))
