"""Pools: roles that share GPUs, what each of them chooses, and what is missing where they do not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.memory.state import Terms, total_gib
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.hosts import HostSet

Partition = tuple[tuple[str, ...], ...]
"""The pools, each with its roles, sorted."""


def pool_indices(partition: Partition) -> dict[str, int]:
    """Return the index of each role's pool."""
    return {role: index for index, pool in enumerate(partition) for role in pool}


def describe_pools(partition: Sequence[Sequence[str]], gpus: Sequence[int]) -> str:
    """Describe pools with their GPUs: ``rollout on 4, actor + reference on 12``."""
    if len(partition) == 1:
        return f"all roles colocated on {gpus[0]}" if len(partition[0]) > 1 else f"{partition[0][0]} on {gpus[0]}"
    return ", ".join(f"{' + '.join(roles)} on {count}" for roles, count in zip(partition, gpus, strict=True))


@dataclass(frozen=True)
class PoolShape:
    """The GPUs of a pool, by the hosts that they are in."""

    hosts: tuple[tuple[int, int], ...]
    """Numbers of GPUs on a host, each with the number of such hosts. A single host stands for any hosts without
    remainders."""
    largest_group: int
    """The most GPUs of a group."""

    @property
    def num_gpus(self) -> int:
        """Return the number of all GPUs."""
        return sum(gpus * number for gpus, number in self.hosts)

    def groups(self, size: int) -> int:
        """Return how many groups of a size there are, each inside a host."""
        if size > self.largest_group:
            return 0
        return sum(gpus // size * number for gpus, number in self.hosts)


@dataclass(frozen=True)
class Pool:
    """Roles that use the same GPUs, one after another."""

    demands: tuple[Demand, ...]
    shape: PoolShape
    host_set: HostSet

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the names of its roles."""
        return tuple(demand.role for demand in self.demands)

    @property
    def is_shared(self) -> bool:
        """Return whether several roles use the pool."""
        return len(self.demands) > 1

    @property
    def counts_memory(self) -> bool:
        """Return whether memory is modelled."""
        return self.host_set.counts_memory

    def takes_turns(self, layout: Layout) -> bool:
        """Return whether a role with this layout gives up memory while others work."""
        return self.is_shared and self.counts_memory and not layout.stays


@dataclass(frozen=True)
class RoleChoice:
    """One role's use of its pool."""

    layout: Layout
    phase: str
    """The phase in which it needs most memory: generate, score or update."""
    awake: Terms
    """GiB on each of its GPUs in that phase."""
    idle: Terms = field(default_factory=dict)
    """GiB on each of its GPUs while other roles work."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of each of its nodes."""
    kv_tokens: float = inf
    """Tokens in the KV cache of one engine; infinite where memory is not modelled."""
    concurrency: float | None = None
    """Sequences that one engine generates at once."""
    margin: Margin = Margin.SAFE
    """The room that is left for the error of its predicted memory."""


@dataclass(frozen=True)
class PoolUse:
    """The choices of all roles of a pool."""

    choices: Mapping[str, RoleChoice]
    margin: Margin
    """The smallest room that is left for the error of a predicted memory."""

    @property
    def unit(self) -> int:
        """Return the size of the largest group that must be inside one host."""
        return max(choice.layout.group_size for choice in self.choices.values())

    @cached_property
    def num_gpus(self) -> int:
        """Return the number of GPUs that at least one role uses."""
        return max(choice.layout.num_gpus for choice in self.choices.values())

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each node."""
        return {node: seconds for choice in self.choices.values() for node, seconds in choice.seconds.items()}

    @cached_property
    def total(self) -> float:
        """Return the seconds of all nodes together."""
        return sum(self.seconds.values())

    def idle_gib_beside(self, role: str) -> float:
        """Return the memory that all other roles hold while this one works."""
        return sum(total_gib(choice.idle) for other, choice in self.choices.items() if other != role)


@dataclass(frozen=True)
class Shortage:
    """The missing memory of the option that came nearest to fitting."""

    role: str
    gib: float
    what: str

    def __str__(self) -> str:
        return f"{self.role}: {self.what}"
