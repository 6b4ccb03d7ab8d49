"""The pinned values of a pool's roles, as numbers of GPUs and groups of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from rlflow.errors import PlacementError
from rlflow.resources.demand import Demand
from rlflow.resources.layout import hosts_of_engine

# Degrees that are tried where they are open.
_DEGREES = [1, 2, 4, 8]


@dataclass(frozen=True)
class PoolPins:
    """The GPUs that the pinned values of a pool's roles ask for."""

    sizes: frozenset[int] | None
    """The numbers of GPUs to try; None: any."""
    gpus: int | None
    """The number of GPUs, if it is pinned."""
    needs: tuple[tuple[int, int], ...]
    """Groups that the GPUs must contain, each inside one host: the size of each, and how many."""

    @property
    def least(self) -> int:
        """Return the fewest GPUs that are enough."""
        return max(size * number for size, number in self.needs)


def pool_pins(demands: Sequence[Demand], largest_host: int) -> PoolPins:
    """Return what a pool's roles pin. A role that does not pin ``gpus`` may use a part of its pool.

    ``largest_host``: the most GPUs of a host. Raises PlacementError when they pin different numbers of GPUs.
    """
    pinned = {demand.role: gpus for demand in demands if (gpus := demand.pinned("gpus")) is not None}
    if len(set(pinned.values())) > 1:
        less, more = min(pinned, key=lambda role: pinned[role]), max(pinned, key=lambda role: pinned[role])
        raise PlacementError(
            f"roles.{more}.gpus",
            f"{more} and {less} share GPUs, but pin {pinned[more]} and {pinned[less]} of them",
            fix=f"ask for the same number, or give {more} its own with colocate=[]",
        )
    needs = tuple(sorted({_group(demand, largest_host) for demand in demands}, reverse=True))
    if pinned:
        return PoolPins(frozenset(pinned.values()), next(iter(pinned.values())), needs)
    pins = PoolPins(None, None, needs)
    sizes = [_sizes_of(demand) for demand in demands]
    if any(size is None for size in sizes):
        return pins
    return replace(pins, sizes=frozenset(size for of in sizes for size in of or () if size >= pins.least))


def _group(demand: Demand, largest_host: int) -> tuple[int, int]:
    """Return the size and number of the groups inside hosts that a role has at least."""
    width, stages = _pinned_width(demand), demand.pinned("pipeline_parallel_size") or 1
    hosts = hosts_of_engine(stages, width, largest_host)
    size, gpus = width * stages // hosts, demand.pinned("gpus")
    if gpus is not None and "data" in demand.parallel:
        return size, gpus // size
    return size, hosts * (demand.pinned("data_parallel_size") or 1)


def _pinned_width(demand: Demand) -> int:
    return prod(demand.pinned(f"{way}_parallel_size") or 1 for way in ("tensor", "sequence"))


def _sizes_of(demand: Demand) -> frozenset[int] | None:
    """Return the sizes that follow from a pinned data-parallel size; None: any."""
    copies = demand.pinned("data_parallel_size")
    if copies is None:
        return None
    degrees = [
        [pinned] if (pinned := demand.pinned(f"{way}_parallel_size")) else _DEGREES
        for way in ("tensor", "sequence", "pipeline")
    ]
    return frozenset(copies * prod(combination) for combination in product(*degrees))
