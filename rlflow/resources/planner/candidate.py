"""Candidates: ways to share GPUs with sizes of pools, the best use of each pool, and the simulated step."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.resources.cluster import Cluster
from rlflow.resources.layout import RolePlacement, workers
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.placement_solver import Counts, PoolRequest, gpu_ids
from rlflow.resources.planner.pools import Partition, PoolUse, RoleChoice, Shortage, pool_indices
from rlflow.resources.planner.simulate import Schedule


@dataclass(frozen=True)
class Candidate:
    """A way to share with pool sizes, with the best use of each pool and the simulated step."""

    partition: Partition
    gpus: tuple[int, ...]
    """The size of each pool."""
    uses: tuple[PoolUse, ...]
    schedule: Schedule

    @property
    def pool_of(self) -> dict[str, int]:
        """Return the index of each role's pool."""
        return pool_indices(self.partition)

    def pool_roles(self, role: str) -> tuple[str, ...]:
        """Return the roles on the GPUs of a role, itself included."""
        return self.partition[self.pool_of[role]]

    @property
    def choices(self) -> dict[str, RoleChoice]:
        """Return the choice of each role."""
        return {role: choice for use in self.uses for role, choice in use.choices.items()}

    @property
    def margin(self) -> Margin:
        """Return the smallest room that is left for the error of a predicted memory."""
        return max(use.margin for use in self.uses)

    @property
    def used_gpus(self) -> int:
        """Return the number of GPUs that at least one role uses."""
        return sum(use.num_gpus for use in self.uses)


@dataclass(frozen=True)
class PlacedCandidate:
    """A candidate with the groups that its hosts hold."""

    candidate: Candidate
    requests: tuple[PoolRequest, ...]
    counts: Counts
    """The GPUs of each pool on each host."""

    @property
    def seconds(self) -> float:
        """Return the length of a step."""
        return self.candidate.schedule.step_seconds

    @property
    def num_pool_hosts(self) -> int:
        """Return the number of (pool, host) pairs."""
        return sum(gpus > 0 for taken in self.counts for gpus in taken)

    def roles(self, cluster: Cluster) -> Mapping[str, RolePlacement]:
        """Return the layout of each role, and its workers on their GPUs."""
        shares = gpu_ids(self.requests, cluster, self.counts)
        placed = {
            role: RolePlacement(choice.layout, tuple(workers(choice.layout, share)))
            for share, use in zip(shares, self.candidate.uses, strict=True)
            for role, choice in use.choices.items()
        }
        return dict(sorted(placed.items()))


@dataclass(frozen=True)
class RejectedCandidate:
    """A way to share with pool sizes that does not fit."""

    partition: Partition
    gpus: tuple[int, ...]
    shortage: Shortage


@dataclass(frozen=True)
class SearchResult:
    """The chosen candidate on its GPUs, with the other candidates."""

    candidate: Candidate
    roles: Mapping[str, RolePlacement]
    alternatives: tuple[Candidate, ...]
    """The other candidates that fit, fastest first."""
    rejected: tuple[RejectedCandidate, ...]
