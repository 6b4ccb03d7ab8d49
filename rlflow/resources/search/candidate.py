"""A way to share GPUs, with the sizes of its pools."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.resources.search.partitions import Partition
from rlflow.resources.search.pool import Choice, Shortage
from rlflow.resources.search.pools import PoolUse
from rlflow.resources.search.simulate import Schedule


@dataclass(frozen=True)
class Candidate:
    """A way to share, with the sizes of its pools, that fits."""

    partition: Partition
    gpus: tuple[int, ...]
    """Of each pool."""
    uses: tuple[PoolUse, ...]
    schedule: Schedule

    @property
    def pool_of(self) -> dict[str, int]:
        return {role: index for index, pool in enumerate(self.partition) for role in pool}

    @property
    def choices(self) -> dict[str, Choice]:
        return {role: choice for use in self.uses for role, choice in use.choices.items()}

    @property
    def used_gpus(self) -> int:
        return sum(max(choice.layout.num_gpus for choice in use.choices.values()) for use in self.uses)


@dataclass(frozen=True)
class Rejected:
    """A way to share, with sizes, that does not fit."""

    partition: Partition
    gpus: tuple[int, ...]
    shortage: Shortage


def describe(partition: Sequence[Sequence[str]], gpus: Sequence[int]) -> str:
    """Pools with their GPUs, as ``rollout on 4, actor + reference on 12``."""
    if len(partition) == 1:
        return f"all on {gpus[0]}" if len(partition[0]) > 1 else f"{partition[0][0]} on {gpus[0]}"
    return ", ".join(f"{' + '.join(roles)} on {count}" for roles, count in zip(partition, gpus, strict=True))
