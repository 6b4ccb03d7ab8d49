"""The search: who shares GPUs, how large the pools are, what each role does in its pool, and on which GPUs.

Candidates are ways to share with sizes of pools. The best use of each pool is found, the step is scheduled, and the
fastest candidates are placed exactly. Of plans within one percent of the shortest step, the one with fewer GPUs wins.
Where samples are generated ahead, the schedules choose the sizes of each way to share, and simulated steps the way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import chain

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster
from rlflow.resources.demand import Demand
from rlflow.resources.layout import RolePlacement
from rlflow.resources.planner.candidate import Candidate, PlacedCandidate, RejectedCandidate, describe_pools
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.pool import HostSet, Shortage
from rlflow.resources.planner.prediction.overlap_prediction import step_seconds
from rlflow.resources.planner.search.host_placement import place, place_least
from rlflow.resources.planner.search.pool_uses import PoolUses
from rlflow.resources.planner.search.sharing import Partition, sharing_partitions
from rlflow.resources.planner.search.size_search import SizeSearch
from rlflow.resources.time.calibration import Calibration
from rlflow.resources.workload import Workload

# The number of fastest candidates that are placed and simulated on real GPUs.
_PLACED = 6
# The limit where many are equally fast, as for models so small that only the latency of a weight sync counts.
_MOST_PLACED = 64
# Step times that differ by less count as equal.
_SAME = 1.01


@dataclass(frozen=True)
class SearchResult:
    """The chosen candidate on its GPUs, with the other candidates."""

    candidate: Candidate
    roles: Mapping[str, RolePlacement]
    alternatives: tuple[Candidate, ...]
    """The other candidates that fit, fastest first."""
    rejected: tuple[RejectedCandidate, ...]


class Search:
    """One search, which caches the best use of each pool."""

    def __init__(
        self, demands: Sequence[Demand], workload: Workload, cluster: Cluster, calibration: Calibration
    ) -> None:
        self.uses = PoolUses(demands, workload, cluster, calibration)
        self.demands = self.uses.demands
        self.workload = workload
        self.cluster = cluster
        self.calibration = calibration
        self.rejected: list[RejectedCandidate] = []

    def best(self) -> SearchResult | None:
        """Return the best plan, or None if nothing fits; ``rejected`` then has the reasons.

        Raises PlacementError for pins that cannot be met.
        """
        self._check()
        streams = [iter(SizeSearch(partition, self.uses)) for partition in self._partitions()]
        heads = [(_order(head), head, stream) for stream in streams if (head := self._following(stream)) is not None]
        heapify(heads)
        fitting: list[Candidate] = []
        found: list[tuple[int, PlacedCandidate]] = []
        while heads:
            _, candidate, stream = heads[0]
            quickest = min((placed.seconds for _, placed in found), default=float("inf"))
            if found and candidate.margin > min(placed.candidate.margin for _, placed in found):
                break
            if len(found) >= (_PLACED if candidate.schedule.step_seconds > quickest * _SAME else _MOST_PLACED):
                break
            if (placed := self._place(candidate)) is not None:
                found.append((len(fitting), placed))
            fitting.append(candidate)
            if (head := self._following(stream)) is not None:
                heapreplace(heads, (_order(head), head, stream))
            else:
                heappop(heads)
        next_of_ways = [head for _, head, _ in sorted(heads, key=lambda each: each[0])]
        if self.workload.ahead is not None:
            placed_heads = ((index, self._place(head)) for index, head in enumerate(next_of_ways, len(fitting)))
            found += [(index, placed) for index, placed in placed_heads if placed is not None]
        fitting += next_of_ways
        found = found or [(len(fitting), placed) for placed in self._place_least()]
        if not found:
            return None
        index, chosen = self._chosen(found)
        others = (*fitting[:index], *fitting[index + 1 :])
        return SearchResult(chosen.candidate, chosen.roles(self.uses), others, tuple(self.rejected))

    def _chosen(self, found: Sequence[tuple[int, PlacedCandidate]]) -> tuple[int, PlacedCandidate]:
        """Return the fastest of the safest candidates, with its number."""
        safest = min(placed.candidate.margin for _, placed in found)
        found = [each for each in found if each[1].candidate.margin == safest]
        if self.workload.ahead is None:
            return _fastest([(placed.seconds, index, placed) for index, placed in found])
        ways: dict[Partition, list[tuple[float, int, PlacedCandidate]]] = {}
        for index, placed in found:
            ways.setdefault(placed.candidate.partition, []).append((placed.seconds, index, placed))
        best = [_fastest(of_way) for of_way in ways.values()]
        return _fastest([(step_seconds(placed.candidate, self.uses), index, placed) for index, placed in best])

    def fits(self, margin: Margin = Margin.POSSIBLE) -> bool:
        """Return whether any plan fits with at least this margin."""
        try:
            self._check()
            placed = (self._place(candidate) for candidate in self.candidates() if candidate.margin <= margin)
            fitting = (each for each in chain(placed, self._place_least()) if each is not None)
            return any(each.candidate.margin <= margin for each in fitting)
        except PlacementError:
            return False

    def _check(self) -> None:
        for demand in self.demands.values():
            host_set = self.host_set([demand.role])
            demand.check(host_set.largest_host, on_gpus=host_set.memory_gib is not None)
            if demand.architecture is None and host_set.memory_gib is not None:
                raise PlacementError(
                    f"roles.{demand.role}.model",
                    "its architecture is not known, and without it neither memory nor time",
                    fix="a card of conf/model, models.<name>.architecture, or a path to a folder with a config.json",
                )

    def candidates(self) -> Iterator[Candidate]:
        """Yield every way to share with all sizes on the grid that fit, and add the others to ``rejected``."""
        for partition in self._partitions():
            stream = iter(SizeSearch(partition, self.uses))
            while (candidate := self._following(stream)) is not None:
                yield candidate

    def _following(self, stream: Iterator[Candidate | RejectedCandidate]) -> Candidate | None:
        """Return the next candidate that fits, and add those before it to ``rejected``; None at the end."""
        for candidate in stream:
            if isinstance(candidate, Candidate):
                return candidate
            self.rejected.append(candidate)
        return None

    def _partitions(self) -> list[Partition]:
        """Return the ways to share whose roles do not contradict each other. Raises PlacementError without any."""
        found: list[Partition] = []
        contradiction: PlacementError | None = None
        for partition in sharing_partitions(list(self.demands.values())):
            try:
                for pool in partition:
                    self.uses.pins(pool)
                    self.host_set(pool)
            except PlacementError as error:
                contradiction = contradiction or error
                continue
            # Left-over GPUs go to the last pool: one that trains, because it can have any size.
            order = sorted(partition, key=lambda pool: (any(self.demands[role].trains for role in pool), pool))
            found.append(tuple(order))
        if contradiction is not None and not found:
            raise contradiction
        return found

    def host_set(self, roles: Sequence[str]) -> HostSet:
        """Return the hosts that the roles may use together."""
        return self.uses.host_set(roles)

    def _place(self, candidate: Candidate) -> PlacedCandidate | None:
        """Place a candidate on hosts, or add it to ``rejected``."""
        placed = place(candidate, self.uses)
        if placed is None:
            what = f"hosts cannot hold {describe_pools(candidate.partition, candidate.gpus)}"
            shortage = Shortage(candidate.partition[0][0], 0, what)
            self.rejected.append(RejectedCandidate(candidate.partition, candidate.gpus, shortage))
        return placed

    def _place_least(self) -> Iterator[PlacedCandidate]:
        """Place the pools of every way to share with as few GPUs as each needs."""
        for partition in self._partitions():
            if (placed := place_least(partition, self.uses)) is not None:
                yield placed


def _fastest(timed: Sequence[tuple[float, int, PlacedCandidate]]) -> tuple[int, PlacedCandidate]:
    """Return the candidate with the shortest step; of those that are nearly as fast, the one with the fewest GPUs."""
    quickest = min(seconds for seconds, _, _ in timed)
    near = [(index, placed) for seconds, index, placed in timed if seconds <= quickest * _SAME]
    return min(near, key=lambda each: (each[1].candidate.used_gpus, each[1].crossed, each[0]))


def _order(candidate: Candidate) -> tuple[Margin, float, int, int, Partition, tuple[int, ...]]:
    step, partition = candidate.schedule.step_seconds, candidate.partition
    return (candidate.margin, step, candidate.used_gpus, len(partition), partition, candidate.gpus)
