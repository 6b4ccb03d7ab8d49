"""Which roles may share GPUs, how many GPUs each pool may get, and the best use of one pool."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rlflow.errors import PlacementError
from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout, Offload
from rlflow.resources.search.choices import choose
from rlflow.resources.search.pool import Choice, Policy, Pool, Shortage, host_gib, resting_terms, static_layout
from rlflow.resources.workload import Workload

Partition = tuple[tuple[str, ...], ...]
"""Roles by pool, sorted."""

_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights")
# So many shares of a cluster are tried as sizes of pools.
_SHARES = 16
# Of auto roles, all ways to share are tried up to here; beyond, those that are used in the field.
_ALL_PARTITIONS = 4


@dataclass(frozen=True)
class PoolUse:
    """What its roles do with a pool."""

    choices: Mapping[str, Choice]

    @property
    def unit(self) -> int:
        """The largest group that must lie inside one host."""
        return max(max(c.layout.tensor_parallel_size, c.layout.sequence_parallel_size) for c in self.choices.values())

    @property
    def seconds(self) -> dict[str, float]:
        return {node: seconds for choice in self.choices.values() for node, seconds in choice.seconds.items()}


def use(pool: Pool, workload: Workload) -> PoolUse | Shortage:
    """The fastest way in which all roles of a pool fit beside one another, or what the nearest lacks.

    What the roles keep while others work is decided for the pool as a whole, each role's own degrees after that.
    Offloading is tried only where nothing fits without.
    """
    lacking: list[Shortage] = []
    known: _Known = {}
    for offload in _OFFLOADS:
        found = []
        for policy in _policies(pool, offload):
            one = _use_by(policy, pool, workload, known)
            if isinstance(one, Shortage):
                lacking.append(one)
            else:
                found.append(one)
        if found:
            return min(found, key=lambda use: sum(use.seconds.values()))
        if not any(demand.trains and "data" in demand.parallel for demand in pool.demands):
            break
    return min(lacking, key=lambda shortage: shortage.gib)


def _policies(pool: Pool, offload: Offload) -> Iterator[Policy]:
    spread = any("data" in demand.parallel for demand in pool.demands)
    sleeping = (False, True) if pool.shared and spread else (False,)
    stages = (2, 3) if any(demand.trains for demand in pool.demands) and spread else (3,)
    scorers = any(not demand.trains and not demand.generates for demand in pool.demands)
    sharding = (False, True) if scorers and spread else (True,)
    if offload == "weights":
        stages = (3,)
    for sleeps, stage, shards in product(sleeping, stages, sharding):
        yield Policy(sleeps=sleeps, zero_stage=stage, offload=offload, shards_scorers=shards)


_Known = dict[tuple[Layout, float, str], Choice | Shortage]


def _use_by(policy: Policy, pool: Pool, workload: Workload, known: _Known) -> PoolUse | Shortage:
    """``known``: what was chosen before for the same memory under another policy."""
    resting = {demand.role: sum(resting_terms(demand, policy, pool).values()) for demand in pool.demands}
    everyone = sum(resting.values())
    choices = {}
    for demand in pool.demands:
        available = pool.site.usable_gib - (everyone - resting[demand.role])
        key = (static_layout(demand, policy, pool), available, demand.role)
        if key not in known:
            known[key] = choose(demand, workload.of(demand.role), policy, pool, available)
        chosen = known[key]
        if isinstance(chosen, Shortage):
            return chosen
        choices[demand.role] = chosen
    parked = sum(host_gib(demand, choices[demand.role]) for demand in pool.demands)
    if parked > pool.site.host_gib:
        what = f"{parked:.0f} GiB of host memory for each GPU, of {pool.site.host_gib:.0f}"
        return Shortage(pool.demands[0].role, parked - pool.site.host_gib, what)
    for copy in workload.copies:
        if copy.source in choices and copy.target in choices:
            both = {copy.source, copy.target}
            needed = sum(sum(choices[role].sync.values()) for role in both)
            needed += sum(gib for role, gib in resting.items() if role not in both)
            if needed > pool.site.usable_gib:
                what = f"{needed:.0f} GiB while its weights go to {copy.target}, of {pool.site.usable_gib:.0f} GiB"
                return Shortage(copy.source, needed - pool.site.usable_gib, what)
    return PoolUse(choices)


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
    """Roles that name one another stay together."""
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


def sizes(wanted: Sequence[frozenset[int] | None], most: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """GPUs of each pool: one of those it pins (None: any), no more than its hosts have, all together ``total`` at most.

    Pools that are open share what is left on a grid. One pool alone is also tried with a half of it, a quarter, ...
    """
    if list(wanted) == [None]:
        yield from ((most[0] >> halvings,) for halvings in range(most[0].bit_length()))
        return
    grain = max(1, 2 ** ((total // _SHARES).bit_length() - 1)) if total > _SHARES else (1 if total <= 8 else 2)
    if len(wanted) > 2 and total > 8:
        grain = max(grain, 2 ** ((total // 8).bit_length() - 1))
    free = [limit for limit, size in zip(most, wanted, strict=True) if size is None]
    for pinned in product(*(sorted(size) for size in wanted if size is not None)):
        left = total - sum(pinned)
        if left < 0 or (free and left < len(free)):
            continue
        for shares in _shares(left, free, grain):
            given, open_ = iter(pinned), iter(shares)
            yield tuple(next(given) if size is not None else next(open_) for size in wanted)


def _shares(left: int, most: Sequence[int], grain: int) -> Iterator[tuple[int, ...]]:
    """For each pool a multiple of the grain or all that its hosts have; for the last what is left."""
    if not most:
        yield ()
    elif len(most) == 1:
        yield (min(left, most[0]),)
    else:
        highest = min(most[0], left - len(most) + 1)
        firsts = list(range(grain, highest + 1, grain))
        for first in [*firsts, *([highest] if highest == most[0] and highest % grain else [])]:
            for others in _shares(left - first, most[1:], grain):
                yield (first, *others)
