"""The search: who shares GPUs, how large the pools are, what each role does in its pool, and on which GPUs.

Candidates are ways to share with sizes of pools. The best use of each pool is found, the step is simulated, and the
fastest candidates are placed exactly. Of plans within one percent of the shortest step, the one with fewer GPUs wins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster
from rlflow.resources.demand import Demand
from rlflow.resources.layout import PoolGpus, RolePlacement, workers
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.data_placement import reading_seconds
from rlflow.resources.planner.placement_solver import PoolRequest, place_pools
from rlflow.resources.planner.pool import HostSet, Pool, Shortage, select_hosts
from rlflow.resources.planner.pool_search import PoolUse, best_use
from rlflow.resources.planner.sharing import (
    Candidate,
    Partition,
    RejectedCandidate,
    describe_pools,
    pinned_pool_sizes,
    pool_sizes,
    sharing_partitions,
)
from rlflow.resources.planner.simulate import simulate
from rlflow.resources.planner.task_times import weight_sync_seconds
from rlflow.resources.time.speed import Calibration
from rlflow.resources.workload import Workload

# The number of fastest candidates that are placed and simulated on real GPUs.
_PLACED = 6
# The limit where many are equally fast, as for models so small that only the latency of a weight sync counts.
_MOST_PLACED = 64
# Step times that differ by less count as equal.
_SAME = 1.01
# Seconds for a sample on the host: the reward `exact` takes 5 us and an advantage 1. The time of a reward that runs
# programs or calls a service is not known in advance.
_HOST_TASK_S = 5e-6


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
        self.demands = {demand.role: demand for demand in sorted(demands, key=lambda demand: demand.role)}
        self.workload = workload
        self.cluster = cluster
        self.calibration = calibration
        self.rejected: list[RejectedCandidate] = []
        self._host_sets: dict[str | None, HostSet] = {}
        self._uses: dict[tuple[tuple[str, ...], int], PoolUse | Shortage] = {}

    def best(self) -> SearchResult | None:
        """Return the best plan, or None if nothing fits; ``rejected`` then has the reasons.

        Raises PlacementError for pins that cannot be met.
        """
        self._check()
        fitting = sorted(self.candidates(), key=_order)
        found: list[tuple[int, Candidate, list[PoolGpus]]] = []
        for index, candidate in enumerate(fitting):
            quickest = min((_time(settled) for _, settled, _ in found), default=float("inf"))
            if found and candidate.margin > min(settled.margin for _, settled, _ in found):
                break
            if len(found) >= (_PLACED if _time(candidate) > quickest * _SAME else _MOST_PLACED):
                break
            placed = self._place(candidate)
            if placed is not None:
                found.append((index, *placed))
        if not found:
            return None
        safest = min(settled.margin for _, settled, _ in found)
        found = [each for each in found if each[1].margin == safest]
        quickest = min(_time(settled) for _, settled, _ in found)
        near = [each for each in found if _time(each[1]) <= quickest * _SAME]
        index, chosen, shares = min(near, key=lambda each: (each[1].used_gpus, sum(map(len, each[2])), each[0]))
        others = (*fitting[:index], *fitting[index + 1 :])
        return SearchResult(chosen, self._on_gpus(chosen, shares), others, tuple(self.rejected))

    def fits(self, margin: Margin = Margin.POSSIBLE) -> bool:
        """Return whether any plan fits with at least this margin."""
        try:
            self._check()
            placed = (self._place(candidate) for candidate in self.candidates() if candidate.margin <= margin)
            return any(each is not None and each[0].margin <= margin for each in placed)
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
        contradiction: PlacementError | None = None
        consistent = 0
        for partition in sharing_partitions(list(self.demands.values())):
            # Left-over GPUs go to the last pool: one that trains, because it can have any size.
            ordered = tuple(sorted(partition, key=lambda pool: (any(self.demands[r].trains for r in pool), pool)))
            try:
                wanted = [pinned_pool_sizes([self.demands[role] for role in pool]) for pool in ordered]
            except PlacementError as error:
                contradiction = contradiction or error
                continue
            consistent += 1
            for gpus in pool_sizes(wanted, [self.host_set(pool).num_gpus for pool in ordered], self._total(ordered)):
                uses = []
                for roles, count in zip(ordered, gpus, strict=True):
                    used = self.pool_use(roles, count, whole=len(ordered) == 1)
                    if isinstance(used, Shortage):
                        self.rejected.append(RejectedCandidate(ordered, gpus, used))
                        break
                    uses.append(used)
                else:
                    yield self._candidate(ordered, gpus, uses)
        if contradiction is not None and not consistent:
            raise contradiction

    def _total(self, partition: Partition) -> int:
        """Return the number of GPUs that any of the pools may use."""
        hosts = {host.name: len(host.usable) for pool in partition for host in self.host_set(pool).hosts}
        return sum(hosts.values())

    def pool_use(self, roles: tuple[str, ...], gpus: int, *, whole: bool = False) -> PoolUse | Shortage:
        """Return the best use of a pool with so many GPUs; ``whole``: it has all GPUs of its hosts."""
        key = (roles, -gpus if whole else gpus)
        if key not in self._uses:
            host_set = self.host_set(roles)
            if gpus > host_set.num_gpus:
                self._uses[key] = Shortage(
                    roles[0], float(gpus - host_set.num_gpus), f"{gpus} of {host_set.num_gpus} GPUs"
                )
            else:
                whole = whole and gpus == host_set.num_gpus
                groups = host_set.groups if whole else lambda size: gpus // size
                self._uses[key] = best_use(self._pool(roles, gpus, groups), self.workload)
        return self._uses[key]

    def host_set(self, roles: Sequence[str]) -> HostSet:
        """Return the hosts that the roles may use."""
        label = self.demands[roles[0]].pins.label
        if label not in self._host_sets:
            try:
                self._host_sets[label] = select_hosts(self.cluster, label, self.calibration)
            except PlacementError as error:
                error.path = f"roles.{roles[0]}.{error.path}" if error.path == "label" else error.path
                raise
        return self._host_sets[label]

    def _pool(self, roles: Sequence[str], gpus: int, groups: Callable[[int], int]) -> Pool:
        host_set = self.host_set(roles)
        return Pool(
            demands=tuple(self.demands[role] for role in roles),
            gpus=gpus,
            groups=groups,
            host_set=host_set,
            largest_group=min(gpus, host_set.largest_host),
        )

    def _candidate(self, partition: Partition, gpus: tuple[int, ...], uses: Sequence[PoolUse]) -> Candidate:
        seconds = {node: value for used in uses for node, value in used.seconds.items()}
        for task in self.workload.tasks:
            host_set = self.host_set(partition[0] if task.role is None else [task.role])
            needed = task.samples * _HOST_TASK_S if task.role is None else seconds[task.node]
            seconds[task.node] = needed + reading_seconds(self.workload, task, host_set, partition, gpus)
        pool_of = {role: index for index, pool in enumerate(partition) for role in pool}
        layouts = {role: choice.layout for used in uses for role, choice in used.choices.items()}
        for sync in self.workload.copies:
            source, target = self.demands[sync.source], self.demands[sync.target]
            same = pool_of[sync.source] == pool_of[sync.target]
            speed = self.host_set([sync.target]).speed
            seconds[sync.node] = weight_sync_seconds(source, target, layouts, speed, same_gpus=same)
        return Candidate(partition, gpus, tuple(uses), simulate(self.workload, seconds, pool_of))

    def _place(self, candidate: Candidate) -> tuple[Candidate, list[PoolGpus]] | None:
        """Place a candidate on GPUs, with smaller groups where the hosts cannot hold larger ones."""
        narrower: Candidate | None = candidate
        while narrower is not None:
            shares = self._solve(narrower)
            settled = self._settle(narrower, shares) if shares is not None else None
            if shares is not None and settled is not None:
                return settled, shares
            narrower = self._narrowed(narrower)
        what = f"hosts cannot hold {describe_pools(candidate.partition, candidate.gpus)}"
        self.rejected.append(
            RejectedCandidate(candidate.partition, candidate.gpus, Shortage(candidate.partition[0][0], 0, what))
        )
        return None

    def _narrowed(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with smaller groups in the pool that has the largest ones, if possible."""
        for index in sorted(range(len(candidate.uses)), key=lambda each: (-candidate.uses[each].unit, each)):
            unit = candidate.uses[index].unit
            if unit == 1:
                break
            roles, gpus = candidate.partition[index], candidate.gpus[index]
            pool = replace(self._pool(roles, gpus, partial(_groups, [gpus])), largest_group=unit - 1)
            used = best_use(pool, self.workload)
            if isinstance(used, PoolUse) and used.unit < unit:
                uses = (*candidate.uses[:index], used, *candidate.uses[index + 1 :])
                return self._candidate(candidate.partition, candidate.gpus, uses)
        return None

    def _solve(self, candidate: Candidate) -> list[PoolGpus] | None:
        """Return the GPUs of each pool. The last pool takes what is left where all GPUs are meant to be used."""
        total = self._total(candidate.partition)
        requests = []
        for index, (roles, gpus, used) in enumerate(
            zip(candidate.partition, candidate.gpus, candidate.uses, strict=True)
        ):
            takes_rest = index == len(candidate.partition) - 1 and sum(candidate.gpus) == total
            pinned = any(self.demands[role].pinned("gpus") for role in roles)
            units = None if takes_rest and not pinned else gpus // used.unit
            requests.append(PoolRequest(",".join(roles), used.unit, units, self.demands[roles[0]].pins.label))
        shares = place_pools(requests, self.cluster)
        if shares is not None and requests[-1].units is None:
            shares[-1] = self._with_rest(shares, requests[-1].label)
        return shares

    def _with_rest(self, shares: list[PoolGpus], label: str | None) -> PoolGpus:
        """Return the last pool's GPUs with those that no group of its largest role can use: smaller groups may."""
        taken = {(host, gpu) for share in shares[:-1] for host, gpus in share for gpu in gpus}
        whole = []
        mine = dict(shares[-1])
        for host in self.cluster.hosts_with(label):
            first = mine.get(host.name, ())
            rest = tuple(gpu for gpu in host.usable if (host.name, gpu) not in taken and gpu not in first)
            if first or rest:
                whole.append((host.name, first + rest))
        return whole

    def _settle(self, candidate: Candidate, shares: list[PoolGpus]) -> Candidate | None:
        """Return the candidate with the groups that its hosts really have, which are fewer on uneven hosts."""
        uses = []
        for roles, share in zip(candidate.partition, shares, strict=True):
            counts = [len(gpus) for _, gpus in share]
            pool = self._pool(roles, sum(counts), partial(_groups, counts))
            # On a host that it shares with others, only its own GPUs count.
            speed = replace(pool.host_set.speed, gpus_per_host=max(counts))
            pool = replace(pool, largest_group=max(counts), host_set=replace(pool.host_set, speed=speed))
            used = best_use(pool, self.workload)
            if isinstance(used, Shortage):
                return None
            uses.append(used)
        gpus = tuple(sum(len(gpus) for _, gpus in share) for share in shares)
        return self._candidate(candidate.partition, gpus, uses)

    def _on_gpus(self, candidate: Candidate, shares: list[PoolGpus]) -> Mapping[str, RolePlacement]:
        placed = {}
        for share, used in zip(shares, candidate.uses, strict=True):
            for role, choice in used.choices.items():
                placed[role] = RolePlacement(choice.layout, tuple(workers(choice.layout, share)))
        return dict(sorted(placed.items()))


def _groups(counts: Sequence[int], size: int) -> int:
    """Return how many groups of ``size`` GPUs fit inside hosts with ``counts`` GPUs."""
    return sum(count // size for count in counts)


def _time(candidate: Candidate) -> float:
    return candidate.schedule.step_seconds


def _order(candidate: Candidate) -> tuple[Margin, float, int, int, Partition, tuple[int, ...]]:
    return (
        candidate.margin,
        _time(candidate),
        candidate.used_gpus,
        len(candidate.partition),
        candidate.partition,
        candidate.gpus,
    )
