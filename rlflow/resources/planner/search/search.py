"""The search: who shares GPUs, how large the pools are, what each role does in its pool, and on which GPUs.

Candidates are ways to share with sizes of pools. The best use of each pool is found, the step is scheduled, and the
fastest candidates are placed exactly. Of plans within one percent of the shortest step, the one with fewer GPUs wins.
Where samples are generated ahead, the steps of the candidates are simulated: a schedule is hardly longer than those.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster
from rlflow.resources.demand import Demand
from rlflow.resources.planner.candidate import Candidate, PlacedCandidate, RejectedCandidate, SearchResult
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.pools import Partition, Shortage, describe_pools
from rlflow.resources.planner.prediction.overlap_prediction import step_seconds
from rlflow.resources.planner.search.host_placement import place, place_least
from rlflow.resources.planner.search.partition_search import PartitionSearch
from rlflow.resources.planner.search.pool_cache import PoolCache
from rlflow.resources.planner.search.pool_pins import pool_pins
from rlflow.resources.planner.search.sharing import sharing_partitions
from rlflow.resources.time.calibration import Calibration
from rlflow.resources.workload import Workload

# The number of fastest candidates that are placed and simulated on real GPUs.
_PLACED = 6
# The limit where many are equally fast, as for models so small that only the latency of a weight sync counts.
_MOST_PLACED = 64
# The same where samples are generated ahead, whose simulation takes longer.
_MOST_SIMULATED = 24
# Step times that differ by less count as equal.
_SAME = 1.01


_Timed = tuple[float, int, PlacedCandidate]
"""The seconds of a step, the number of a candidate, and the candidate on its hosts."""


class Search:
    """One search, which caches the best use of each pool."""

    def __init__(
        self, demands: Sequence[Demand], workload: Workload, cluster: Cluster, calibration: Calibration
    ) -> None:
        self.inputs = PlannerInputs.of(demands, workload, cluster, calibration)
        self.pools = PoolCache(self.inputs)
        self.rejected: list[RejectedCandidate] = []

    def best(self) -> SearchResult | None:
        """Return the best plan, or None if nothing fits; ``rejected`` then has the reasons.

        Raises PlacementError for pins that cannot be met.
        """
        self._check()
        ahead = self.inputs.workload.ahead is not None
        most = _MOST_SIMULATED if ahead else _MOST_PLACED
        streams = [self._fastest_first(partition) for partition in self._partitions()]
        heads = [(_order(head), head, stream) for stream in streams if (head := next(stream, None)) is not None]
        heapify(heads)
        fitting: list[Candidate] = []
        placed: list[_Timed] = []
        while heads:
            _, candidate, stream = heads[0]
            quickest = min((seconds for seconds, _, _ in placed), default=float("inf"))
            if placed and candidate.margin > min(plan.candidate.margin for _, _, plan in placed):
                break
            if len(placed) >= (_PLACED if candidate.schedule.step_seconds > quickest * _SAME else most):
                break
            if (plan := self._place(candidate)) is not None:
                placed.append(self._timed(len(fitting), plan))
            fitting.append(candidate)
            if (head := next(stream, None)) is not None:
                heapreplace(heads, (_order(head), head, stream))
            else:
                heappop(heads)
        next_of_ways = [head for _, head, _ in sorted(heads, key=lambda entry: entry[0])]
        if ahead:
            plans = ((index, self._place(head)) for index, head in enumerate(next_of_ways, len(fitting)))
            placed += [self._timed(index, plan) for index, plan in plans if plan is not None]
        fitting += next_of_ways
        placed = placed or [self._timed(len(fitting), plan) for plan in self._place_least()]
        if not placed:
            return None
        safest = min(plan.candidate.margin for _, _, plan in placed)
        index, chosen = _fastest([timed for timed in placed if timed[-1].candidate.margin == safest])
        alternatives = (*fitting[:index], *fitting[index + 1 :])
        roles = chosen.roles(self.inputs.cluster)
        return SearchResult(chosen.candidate, roles, alternatives, tuple(self.rejected))

    def fits(self, margin: Margin = Margin.POSSIBLE) -> bool:
        """Return whether any plan fits with at least this margin."""
        try:
            self._check()
            for candidate in self.candidates():
                if candidate.margin <= margin:
                    plan = self._place(candidate)
                    if plan is not None and plan.candidate.margin <= margin:
                        return True
            return any(plan.candidate.margin <= margin for plan in self._place_least())
        except PlacementError:
            return False

    def candidates(self) -> Iterator[Candidate]:
        """Yield every way to share with all sizes that fit, and add the others to ``rejected``."""
        for partition in self._partitions():
            search = PartitionSearch(partition, self.pools)
            yield from search.candidates()
            self.rejected += search.rejected

    def _fastest_first(self, partition: Partition) -> Iterator[Candidate]:
        search = PartitionSearch(partition, self.pools)
        yield from search.fastest_first()
        self.rejected += search.rejected

    def _timed(self, index: int, plan: PlacedCandidate) -> _Timed:
        """Return a candidate after its step, which is simulated where samples are generated ahead."""
        return step_seconds(plan.candidate, self.inputs), index, plan

    def _check(self) -> None:
        for demand in self.inputs.demands.values():
            host_set = self.inputs.host_set([demand.role])
            demand.check(host_set.largest_host, on_gpus=host_set.counts_memory)

    def _partitions(self) -> list[Partition]:
        """Return the ways to share whose roles do not contradict each other. Raises PlacementError without any."""
        demands = self.inputs.demands
        partitions: list[Partition] = []
        contradiction: PlacementError | None = None
        for partition in sharing_partitions(list(demands.values())):
            try:
                for roles in partition:
                    pool_pins(self.inputs.demands_of(roles), self.inputs.host_set(roles).largest_host)
            except PlacementError as error:
                contradiction = contradiction or error
                continue
            # Left-over GPUs go to the last pool: one that trains, because it can have any size.
            order = sorted(partition, key=lambda roles: (any(demands[role].job == "train" for role in roles), roles))
            partitions.append(tuple(order))
        if contradiction is not None and not partitions:
            raise contradiction
        return partitions

    def _place(self, candidate: Candidate) -> PlacedCandidate | None:
        """Place a candidate on hosts, or add it to ``rejected``."""
        plan = place(candidate, self.pools)
        if plan is None:
            what = f"hosts cannot hold {describe_pools(candidate.partition, candidate.gpus)}"
            shortage = Shortage(candidate.partition[0][0], 0, what)
            self.rejected.append(RejectedCandidate(candidate.partition, candidate.gpus, shortage))
        return plan

    def _place_least(self) -> Iterator[PlacedCandidate]:
        """Place the pools of every way to share with as few GPUs as each needs."""
        for partition in self._partitions():
            if (plan := place_least(partition, self.pools)) is not None:
                yield plan


def _fastest(timed: Sequence[_Timed]) -> tuple[int, PlacedCandidate]:
    """Return the candidate with the shortest step; of those that are nearly as fast, the one with the fewest GPUs."""
    quickest = min(seconds for seconds, _, _ in timed)
    near = [(index, plan) for seconds, index, plan in timed if seconds <= quickest * _SAME]
    return min(near, key=lambda entry: (entry[1].candidate.used_gpus, entry[1].num_pool_hosts, entry[0]))


def _order(candidate: Candidate) -> tuple[Margin, float, int, int, Partition, tuple[int, ...]]:
    step, partition = candidate.schedule.step_seconds, candidate.partition
    return (candidate.margin, step, candidate.used_gpus, len(partition), partition, candidate.gpus)
