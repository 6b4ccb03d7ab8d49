"""Which roles may share GPUs."""

from collections.abc import Iterator, Sequence

from rlflow.errors import PlacementError
from rlflow.resources.demand import Demand

Partition = tuple[tuple[str, ...], ...]
"""Roles by pool, sorted."""

# Of auto roles, all ways to share are tried up to here; beyond, those that are used in the field.
_ALL_PARTITIONS = 4


def partitions(demands: Sequence[Demand]) -> list[Partition]:
    """Ways to share GPUs that the recipe allows. Raises PlacementError where its ``colocate`` contradict each other."""
    blocks = _blocks(demands)
    alone = {demand.role for demand in demands if demand.wants.colocate == ()}
    fixed = {demand.role for demand in demands if demand.wants.colocate != "auto"}
    closed = [block for block in blocks if set(block) & fixed]
    loose = [block for block in blocks if not set(block) & fixed]
    # Others may join roles that name their company, but not one that wants its own GPUs.
    hosts = [block for block in closed if not set(block) & alone]
    sharing = [block for block in closed if set(block) & alone]
    found = set()
    ways = (
        _all_ways([*hosts, *loose])
        if len(hosts) + len(loose) <= _ALL_PARTITIONS
        else _usual_ways([*hosts, *loose], demands)
    )
    for way in ways:
        found.add(
            tuple(
                sorted(
                    tuple(sorted(role for block in pool for role in block)) for pool in [*way, *[[b] for b in sharing]]
                )
            )
        )
    labels = {demand.role: demand.wants.label for demand in demands}
    allowed = [way for way in found if all(len({labels[role] for role in pool}) == 1 for pool in way)]
    if not allowed:
        role = next(demand.role for demand in demands if demand.wants.label is not None)
        raise PlacementError(
            f"roles.{role}.label", "differs from that of a role it shares GPUs with", fix="one label for both"
        )
    return sorted(allowed, key=lambda way: (len(way), way))


def _blocks(demands: Sequence[Demand]) -> list[tuple[str, ...]]:
    """Roles that name one another stay together. Raises PlacementError where one of them wants GPUs of its own."""
    alone = {demand.role for demand in demands if demand.wants.colocate == ()}
    for demand in demands:
        for other in () if demand.wants.colocate == "auto" else demand.wants.colocate:
            if other in alone:
                raise PlacementError(
                    f"roles.{demand.role}.colocate",
                    f"names {other}, which wants GPUs of its own (roles.{other}.colocate=[])",
                    fix=f"roles.{other}.colocate=auto",
                )
    merged: list[set[str]] = []
    for demand in demands:
        company = {demand.role, *(() if demand.wants.colocate == "auto" else demand.wants.colocate)}
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
    """All together; engines apart; engines, trained and scoring models each apart; engines with the scoring models;
    every role by itself."""
    by_role = {demand.role: demand for demand in demands}
    trained = [b for b in blocks if any(by_role[role].trains for role in b)]
    engines = [b for b in blocks if b not in trained and any(by_role[role].generates for role in b)]
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
