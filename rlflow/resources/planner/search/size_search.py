"""The sizes of the pools of one way to share GPUs, the fastest step first.

Sizes are chosen pool by pool, and the choice with the least bound on its step is always continued first. A bound is a
step in which a pool whose best use is not known yet takes for each of its nodes the least time that any layout needs,
and pools without a size have the best of those that are left for them. Schedules only grow with the times of their
nodes, so that no step is missed, and best uses are found for few of all sizes.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from heapq import heappop, heappush

from rlflow.resources.planner.candidate import (
    Candidate,
    RejectedCandidate,
    least_other_seconds,
    simulated,
)
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pool import Shortage
from rlflow.resources.planner.search.pool_search import PoolUse
from rlflow.resources.planner.search.pool_uses import PoolUses
from rlflow.resources.planner.search.sharing import Partition, SizeGrid, pool_indices
from rlflow.resources.planner.simulate import StepScheduler

_Sizes = tuple[int, ...]
# Memory is safer, then the step shorter; at the same step what is unfinished comes first, so that ties are complete.
_Key = tuple[Margin, float, bool, int, _Sizes]


class SizeSearch:
    """The sizes of the pools of one way to share, as an iterator."""

    def __init__(self, partition: Partition, of: PoolUses) -> None:
        self.partition = partition
        self._of = of
        most = [of.host_set(pool).num_gpus for pool in partition]
        self._grid = SizeGrid([of.pins(pool) for pool in partition], most, of.total(partition))
        self._scheduler = StepScheduler(of.workload, pool_indices(partition))
        self._up_to: dict[tuple[int, int], tuple[Margin, Mapping[str, float]]] = {}
        self._least: dict[object, tuple[Margin, Mapping[str, float]]] = {}
        self._other_seconds = cache(partial(least_other_seconds, partition, of))

    def __iter__(self) -> Iterator[Candidate | RejectedCandidate]:
        """Yield the candidates in the order of their margins and steps; those that do not fit come in between."""
        heap: list[tuple[_Key, Candidate | None]] = [((Margin.SAFE, 0.0, False, 0, ()), None)]
        while heap:
            (_, _, _, _, sizes), candidate = heappop(heap)
            if candidate is not None:
                yield candidate
                continue
            is_complete = len(sizes) == len(self.partition)
            if is_complete:
                found = self._evaluated(sizes)
                if isinstance(found, RejectedCandidate):
                    yield found
                    continue
                if found is not None:
                    step = found.schedule.step_seconds
                    heappush(heap, ((found.margin, step, True, found.used_gpus, sizes), found))
                    continue
            for longer in [sizes] if is_complete else map(sizes.__add__, self._next(sizes)):
                if (bound := self._bound(longer)) is not None:
                    heappush(heap, ((*bound, False, 0, longer), None))

    def _next(self, sizes: _Sizes) -> Iterator[tuple[int]]:
        return ((size,) for size in self._grid.next_sizes(sizes))

    def _known(self, sizes: _Sizes) -> list[PoolUse | Shortage | None]:
        gpus = self._grid.in_order(sizes)
        return [
            None if count is None else self._of.known(roles, count)
            for roles, count in zip(self.partition, gpus, strict=True)
        ]

    def _evaluated(self, sizes: _Sizes) -> Candidate | RejectedCandidate | None:
        """Return the candidate if all uses are known; otherwise find one more use and return None."""
        gpus = tuple(count for count in self._grid.in_order(sizes) if count is not None)
        uses = self._known(sizes)
        if None in uses:
            index = uses.index(None)
            uses[index] = self._of.use(self.partition[index], gpus[index])
        for use in uses:
            if isinstance(use, Shortage):
                return RejectedCandidate(self.partition, gpus, use)
        found = [use for use in uses if isinstance(use, PoolUse)]
        return simulated(self.partition, gpus, found, self._of) if len(found) == len(uses) else None

    def _bound(self, sizes: _Sizes) -> tuple[Margin, float] | None:
        """Return the safest margin and the least step for these sizes of the first pools; None if they do not fit."""
        gpus = self._grid.in_order(sizes)
        seconds = dict(self._other_seconds(single=not all(count and count > 1 for count in gpus)))
        margin = Margin.SAFE
        for index, size in self._grid.largest_open(sizes):
            safest, least = self._least_up_to(index, size)
            margin = max(margin, safest)
            seconds |= least
        for roles, count, use in zip(self.partition, gpus, self._known(sizes), strict=True):
            if isinstance(use, Shortage):
                # The sizes with which it was found are among those that do not fit.
                return None
            if use is not None:
                margin = max(margin, use.margin)
                seconds |= use.seconds
            elif count is not None:
                safest, least = self._least_of(roles, count)
                margin = max(margin, safest)
                seconds |= least
        return margin, self._scheduler.step_seconds(seconds)

    def _least_of(self, roles: Sequence[str], gpus: int) -> tuple[Margin, Mapping[str, float]]:
        """Return the safest margin and the least time of each node of a pool."""
        if (roles, gpus) not in self._least:
            self._least[roles, gpus] = self._find_least(roles, gpus)
        return self._least[roles, gpus]

    def _find_least(self, roles: Sequence[str], gpus: int) -> tuple[Margin, Mapping[str, float]]:
        margin, seconds = Margin.SAFE, dict[str, float]()
        for role in roles:
            safest, least = self._of.least_use(role, roles, gpus)
            margin = max(margin, safest)
            seconds |= least
        return margin, seconds

    def _least_up_to(self, index: int, size: int) -> tuple[Margin, Mapping[str, float]]:
        """Return the same for a pool with any of its sizes up to ``size``."""
        if (index, size) not in self._up_to:
            smaller = self._grid.next_smaller(index, size)
            margin, seconds = self._least_of(self.partition[index], size)
            if smaller is not None:
                safest, least = self._least_up_to(index, smaller)
                margin = min(margin, safest)
                seconds = {node: min(value, least[node]) for node, value in seconds.items()}
            self._up_to[index, size] = margin, seconds
        return self._up_to[index, size]
