"""The best use of one pool."""

from rlflow.resources.planner.hosts import select_hosts
from rlflow.resources.planner.pools import Pool, PoolShape, PoolUse, Shortage
from rlflow.resources.planner.search.pool_search import LayoutSearches, best_use
from tests.unit.resources.planner.planning import SEVEN_B, cluster, demand, workload


def pool(gpus: int, *roles: str) -> Pool:
    on = cluster(8)
    return Pool(
        demands=tuple(demand(role, SEVEN_B) for role in roles),
        shape=PoolShape(((gpus, 1),), gpus),
        host_set=select_hosts(on, (), {}),
    )


def used(gpus: int, *roles: str, longest: int = 4096) -> PoolUse | Shortage:
    made = pool(gpus, *roles)
    work = workload(made.demands, longest=longest)
    return best_use(made, work, LayoutSearches(work))


def test_offload_only_where_nothing_fits_without() -> None:
    """7B with 18 B a parameter: 128 GiB. Three GPUs hold it, one needs the optimizer elsewhere."""
    three, one = used(3, "actor"), used(1, "actor")
    assert isinstance(three, PoolUse)
    assert isinstance(one, PoolUse)
    assert three.choices["actor"].layout.offload == "none"
    assert one.choices["actor"].layout.offload == "optimizer"


def test_what_every_role_needs_beside_the_others_fits() -> None:
    found = used(4, "actor", "reference", "rollout")
    assert isinstance(found, PoolUse)
    idle = {role: sum(choice.idle.values()) for role, choice in found.choices.items()}
    for role, choice in found.choices.items():
        beside = sum(gib for other, gib in idle.items() if other != role)
        assert sum(choice.awake.values()) + beside <= 79.6


def test_host_memory_bounds_what_sleeps_there() -> None:
    from dataclasses import replace

    roomy = pool(1, "actor")
    narrow = replace(roomy, host_set=replace(roomy.host_set, host_gib=20.0))
    work = workload(narrow.demands, longest=4096)
    assert isinstance(best_use(roomy, work, LayoutSearches(work)), PoolUse)
    assert isinstance(best_use(narrow, work, LayoutSearches(work)), Shortage)


def test_longer_sequences_need_more_and_take_longer() -> None:
    short, long = used(8, "actor", longest=2048), used(8, "actor", longest=16384)
    assert isinstance(short, PoolUse)
    assert isinstance(long, PoolUse)
    assert sum(short.seconds.values()) < sum(long.seconds.values())
    assert isinstance(used(1, "actor", longest=10**6), Shortage)
