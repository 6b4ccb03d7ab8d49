"""One way to share GPUs with all sizes of its pools."""

from collections.abc import Iterator

from rlflow.resources.planner.candidate import Candidate, RejectedCandidate
from rlflow.resources.planner.pools import Partition, PoolUse, Shortage
from rlflow.resources.planner.prediction.partition_times import PartitionTimes
from rlflow.resources.planner.search.pool_cache import PoolCache
from rlflow.resources.planner.search.pool_pins import pool_pins
from rlflow.resources.planner.search.pool_sizes import pool_sizes


class PartitionSearch:
    """The candidates of one way to share GPUs."""

    def __init__(self, partition: Partition, cache: PoolCache) -> None:
        self._partition, self._cache = partition, cache
        self._times = PartitionTimes(cache.inputs, partition)
        self.rejected: list[RejectedCandidate] = []
        """Sizes that do not fit, as far as they were tried; of several with the same shortage the first."""

    def candidates(self) -> Iterator[Candidate]:
        """Yield all candidates that fit, in the order of their sizes."""
        return (self._times.candidate(gpus, uses) for gpus, uses in self._fitting())

    def fastest_first(self) -> Iterator[Candidate]:
        """Return all candidates that fit, the safest and fastest first."""
        fitting = list(self._fitting())
        steps = self._times.step_seconds(fitting).tolist()
        keys = [
            (max(use.margin for use in uses), step, sum(use.num_gpus for use in uses))
            for (_, uses), step in zip(fitting, steps, strict=True)
        ]
        return (self._times.candidate(*fitting[index]) for index in sorted(range(len(fitting)), key=keys.__getitem__))

    def _fitting(self) -> Iterator[tuple[tuple[int, ...], list[PoolUse]]]:
        """Yield the sizes that fit, with the best use of each pool."""
        inputs, self.rejected = self._cache.inputs, []
        pins = [pool_pins(inputs.demands_of(roles)) for roles in self._partition]
        limits = [inputs.host_set(roles).num_gpus for roles in self._partition]
        reported: set[Shortage] = set()
        for gpus in pool_sizes(pins, limits, inputs.num_gpus(self._partition)):
            uses = []
            for roles, count in zip(self._partition, gpus, strict=True):
                use = self._cache.use(roles, count)
                if isinstance(use, Shortage):
                    if use not in reported:
                        reported.add(use)
                        self.rejected.append(RejectedCandidate(self._partition, gpus, use))
                    break
                uses.append(use)
            else:
                yield gpus, uses
