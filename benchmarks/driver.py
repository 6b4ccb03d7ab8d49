"""Measure what the driver spends on generation: the time of one scheduling event while samples wait.

``python -m benchmarks.driver [--json FILE]``

An event is an engine's report of finished samples: the scheduler notes it, preempts if a cache is about to overflow,
and assigns queued samples. The figure is the mean over the events in which 64, 256 or 1,024 engines generate a quarter
of all samples, with response lengths that differ by a factor of a hundred.
"""

import argparse
import heapq
import time
from pathlib import Path

import numpy as np

from benchmarks.reporting import Goal, finish
from rlflow.runtime.generation.engine_state import Capacity
from rlflow.runtime.generation.scheduler import Scheduler

_GOAL_MS = {64: 0.2, 256: 0.8, 1024: 3.5}
_SLOTS, _ROWS_PER_ENGINE, _GROUP_SIZE, _MAX_TOKENS, _PROMPT = 64, 128, 8, 8192, 128
# An engine reports when one in this many of its slots is finished.
_SHARE = 32


def event_ms(engines: int, seed: int = 0) -> float:
    """Return the mean milliseconds of a scheduling event while half of the samples are queued."""
    generator = np.random.default_rng(seed)
    num_rows = engines * _ROWS_PER_ENGINE
    lengths = np.clip(generator.lognormal(6.5, 1.0, num_rows), 64, _MAX_TOKENS - 1).astype(np.int64)
    room = Capacity(_SLOTS, _SLOTS * 2048)
    prompts = np.full(num_rows // _GROUP_SIZE, _PROMPT)
    scheduler = Scheduler(prompts, _GROUP_SIZE, _MAX_TOKENS, dict.fromkeys(range(engines), room))
    steps = [0] * engines
    tokens = np.zeros(num_rows, np.int64)
    ends: list[dict[int, int]] = [{} for _ in range(engines)]
    """The step at which each row ends, by engine."""
    reports: list[tuple[int, int]] = []
    """A heap of the steps at which engines report next."""

    def start(assigned: dict[int, list[int]]) -> None:
        for rank, rows in assigned.items():
            ends[rank] |= {row: steps[rank] + int(lengths[row] - tokens[row]) for row in rows}

    def next_report(rank: int) -> int:
        return sorted(ends[rank].values())[: _SLOTS // _SHARE][-1]

    start(scheduler.assign())
    reports = [(next_report(rank), rank) for rank in range(engines)]
    heapq.heapify(reports)
    seconds, events = 0.0, 0
    while scheduler.num_queued > num_rows // 4:
        step, rank = heapq.heappop(reports)
        steps[rank] = max(step, steps[rank])
        done = [row for row, end in ends[rank].items() if end <= steps[rank]]
        for row in done:
            del ends[rank][row]
        before = time.thread_time()
        scheduler.finished(rank, done, lengths[done].tolist(), steps[rank])
        leaving_rank, leaving = scheduler.preempt(rank)
        if leaving:
            # The engine has generated up to the step of its own last report.
            left = [int(lengths[row]) - (ends[leaving_rank].pop(row) - steps[leaving_rank]) for row in leaving]
            tokens[leaving] = left
            scheduler.preempted(leaving_rank, leaving, left)
        assigned = scheduler.assign()
        seconds += time.thread_time() - before
        events += 1
        start(assigned)
        if ends[rank]:
            heapq.heappush(reports, (next_report(rank), rank))
    return seconds / events * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    figures = {f"event_ms_{engines}": event_ms(engines) for engines in _GOAL_MS}
    goals = {
        f"event_ms_{engines}": Goal(f"at most {goal}", figures[f"event_ms_{engines}"] <= goal)
        for engines, goal in _GOAL_MS.items()
    }
    return finish("driver", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
