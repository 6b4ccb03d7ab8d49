"""The ways for roles to share GPUs: which roles form a pool."""

from collections.abc import Iterator, Sequence

from rlflow.errors import PlacementError
from rlflow.resources.demand import Demand
from rlflow.resources.planner.pools import Partition

# Up to so many blocks of roles, all ways to share are tried; beyond, those that are common in practice.
_ALL_PARTITIONS = 4


def sharing_partitions(demands: Sequence[Demand]) -> list[Partition]:
    """Return the ways to share GPUs that the recipe allows. Raises PlacementError for contradicting ``colocate``."""
    blocks = _blocks(demands)
    alone = {demand.role for demand in demands if demand.pins.colocate == ()}
    fixed = {demand.role for demand in demands if demand.pins.colocate != "auto"}
    closed = [block for block in blocks if set(block) & fixed]
    loose = [block for block in blocks if not set(block) & fixed]
    # Other roles may join roles that name each other, but not a role that wants its own GPUs.
    joinable = [block for block in closed if not set(block) & alone]
    separate = [block for block in closed if set(block) & alone]
    open_blocks = [*joinable, *loose]
    ways = _all_ways(open_blocks) if len(open_blocks) <= _ALL_PARTITIONS else _usual_ways(open_blocks, demands)
    pools_of = ([*way, *([block] for block in separate)] for way in ways)
    partitions = {
        tuple(sorted(tuple(sorted(role for block in pool for role in block)) for pool in pools)) for pools in pools_of
    }
    return sorted(partitions, key=lambda partition: (len(partition), partition))


def _blocks(demands: Sequence[Demand]) -> list[tuple[str, ...]]:
    """Group roles that name one another. Raises PlacementError where one of them wants GPUs of its own."""
    alone = {demand.role for demand in demands if demand.pins.colocate == ()}
    for demand in demands:
        for other in () if demand.pins.colocate == "auto" else demand.pins.colocate:
            if other in alone:
                raise PlacementError(
                    f"roles.{demand.role}.colocate",
                    f"names {other}, which must have GPUs of its own (roles.{other}.colocate=[])",
                    fix=f"roles.{other}.colocate=auto",
                )
    merged: list[set[str]] = []
    for demand in demands:
        company = {demand.role, *(() if demand.pins.colocate == "auto" else demand.pins.colocate)}
        touching = [other for other in merged if other & company]
        merged = [other for other in merged if not other & company]
        merged.append(company.union(*touching))
    return sorted(tuple(sorted(block)) for block in merged)


def _all_ways(blocks: Sequence[tuple[str, ...]]) -> Iterator[list[list[tuple[str, ...]]]]:
    if not blocks:
        yield []
        return
    first, rest = blocks[0], blocks[1:]
    for way in _all_ways(rest):
        yield [[first], *way]
        for index, pool in enumerate(way):
            yield [*way[:index], [first, *pool], *way[index + 1 :]]


def _usual_ways(blocks: Sequence[tuple[str, ...]], demands: Sequence[Demand]) -> Iterator[list[list[tuple[str, ...]]]]:
    """Yield the partitions that are common in practice.

    These are: all colocated; engines apart; engines, trained and scoring models each apart; engines with the scoring
    models; engines one by one with all others together, or with trained roles one by one; every role on its own GPUs.
    """
    by_role = {demand.role: demand for demand in demands}
    trained = [b for b in blocks if any(by_role[role].job == "train" for role in b)]
    engines = [b for b in blocks if b not in trained and any(by_role[role].job == "serve" for role in b)]
    scorers = [b for b in blocks if b not in trained and b not in engines]
    candidates = (
        [list(blocks)],
        [engines, [*trained, *scorers]],
        [engines, trained, scorers],
        [[*engines, *scorers], trained],
        [*([block] for block in engines), [*trained, *scorers]],
        [*([block] for block in engines), *([block] for block in trained), scorers],
        [[block] for block in blocks],
    )
    for way in candidates:
        yield [pool for pool in way if pool]
