"""One way to share GPUs with all sizes of its pools."""

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from rlflow.resources.planner.candidate import Candidate, RejectedCandidate
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pools import Partition, PoolUse, Shortage
from rlflow.resources.planner.prediction.partition_times import PartitionTimes
from rlflow.resources.planner.search.pool_cache import PoolCache
from rlflow.resources.planner.search.pool_pins import pool_pins
from rlflow.resources.planner.search.pool_sizes import pool_sizes
from rlflow.resources.planner.simulate import FloatArray


class PartitionSearch:
    """The candidates of one way to share GPUs."""

    def __init__(self, partition: Partition, cache: PoolCache) -> None:
        inputs = cache.inputs
        self._partition, self._cache = partition, cache
        self._times = PartitionTimes(inputs, partition)
        pins = [pool_pins(inputs.demands_of(roles), inputs.host_set(roles).largest_host) for roles in partition]
        limits = [inputs.host_set(roles).num_gpus for roles in partition]
        self._sizes = pool_sizes(pins, limits, inputs.num_gpus(partition))
        self._shortages: dict[Shortage, int] = {}

    @property
    def rejected(self) -> list[RejectedCandidate]:
        """Return the sizes that do not fit, as far as they were tried; of several with the same shortage the first."""
        by_size = sorted((index, shortage) for shortage, index in self._shortages.items())
        return [RejectedCandidate(self._partition, self._sizes[index], shortage) for index, shortage in by_size]

    def candidates(self) -> Iterator[Candidate]:
        """Yield all candidates that fit, in the order of their sizes."""
        candidates = (self._candidate(index) for index in range(len(self._sizes)))
        return (candidate for candidate in candidates if candidate is not None)

    def fastest_first(self) -> Iterator[Candidate]:
        """Yield all candidates that fit, the safest and fastest first.

        Sizes are tried in the order of their bounds. A candidate is yielded when no size that is left can be better.
        """
        bounds = self._bounds()
        tried: list[tuple[Margin, float, int, int, Candidate]] = []
        for index in np.argsort(bounds, kind="stable").tolist():
            while tried and tried[0] < (Margin.SAFE, bounds[index]):
                yield heappop(tried)[-1]
            if (candidate := self._candidate(index)) is not None:
                step = candidate.schedule.step_seconds
                heappush(tried, (candidate.margin, step, candidate.used_gpus, index, candidate))
        while tried:
            yield heappop(tried)[-1]

    def _bounds(self) -> FloatArray:
        """Return a bound of the step of each size: memory is no limit, and hosts take no time."""
        sizes = np.array(self._sizes, dtype=int).reshape(-1, len(self._partition))
        seconds: dict[str, FloatArray] = {}
        for roles, column in zip(self._partition, sizes.T, strict=True):
            counts, places = np.unique(column, return_inverse=True)
            least = [self._cache.least_seconds(roles, count) for count in counts.tolist()]
            for task in self._cache.inputs.workload.tasks:
                if task.role in roles:
                    seconds[task.node] = np.array([by_node[task.node] for by_node in least])[places]
                    seconds[task.node][np.isinf(seconds[task.node])] = 0.0
        return self._times.least_step_seconds(seconds, len(sizes))

    def _candidate(self, index: int) -> Candidate | None:
        """Return the candidate with the best use of each pool of a size; None if it does not fit."""
        gpus, uses = self._sizes[index], list[PoolUse]()
        for roles, count in zip(self._partition, gpus, strict=True):
            use = self._cache.use(roles, count)
            if isinstance(use, Shortage):
                self._shortages[use] = min(index, self._shortages.get(use, index))
                return None
            uses.append(use)
        return self._times.candidate(gpus, uses)
