"""Ways to share and sizes of pools, counted; and one pool's use."""

from math import comb

from rlflow.resources.planner.hosts import select_hosts
from rlflow.resources.planner.pools import Pool, PoolShape, PoolUse, Shortage
from rlflow.resources.planner.search.pool_pins import PoolPins, pool_pins
from rlflow.resources.planner.search.pool_search import LayoutSearches, best_use
from rlflow.resources.planner.search.pool_sizes import pool_sizes
from rlflow.resources.planner.search.sharing import sharing_partitions
from tests.unit.resources.planner.planning import SEVEN_B, cluster, demand, workload


def test_all_ways_to_share_of_few_roles() -> None:
    """Bell numbers: 1, 2, 5, 15."""
    roles = ["actor", "critic", "reference", "rollout"]
    for count, ways in ((1, 1), (2, 2), (3, 5), (4, 15)):
        assert len(sharing_partitions([demand(role) for role in roles[:count]])) == ways


def test_pins_of_company_are_kept() -> None:
    demands = [demand("actor", colocate=("rollout",)), demand("rollout"), demand("reference", colocate=())]
    assert sharing_partitions(demands) == [(("actor", "rollout"), ("reference",))]


def test_the_ways_of_the_field_are_tried_for_many_roles() -> None:
    names = ["actor", "critic", "rollout", "reference", "judge", "judge_2"]
    found = sharing_partitions([demand(name) for name in names])
    together = tuple(sorted(names))
    rest = tuple(sorted(set(names) - {"rollout"}))
    assert (together,) in found
    assert (rest, ("rollout",)) in found
    assert tuple((name,) for name in sorted(names)) in found


def pins(*sizes: int) -> PoolPins:
    """Return what a pool of one of these sizes pins; without any, a pool of any size."""
    return PoolPins(frozenset(sizes) or None, None, ((1, 1),))


def test_sizes() -> None:
    assert pool_sizes([pins()], [8], 8) == [(1,), (2,), (4,), (8,)]
    assert pool_sizes([pins(), pins()], [4, 4], 4) == [(1, 3), (2, 2), (3, 1)]
    assert (12, 4) in pool_sizes([pins(), pins()], [16, 16], 16)
    assert pool_sizes([pins(4), pins()], [16, 16], 16) == [(4, 12)]
    assert pool_sizes([pins(4), pins(12)], [16, 16], 16) == [(4, 12)]
    assert pool_sizes([pins(4), pins(16)], [16, 16], 16) == []
    assert all(sum(split) == 63 for split in pool_sizes([pins()] * 3, [63] * 3, 63))


def test_sizes_within_the_hosts_of_a_label() -> None:
    """One pool may have 5 of the 12 GPUs, the other the 7 others."""
    found = pool_sizes([pins(), pins()], [5, 7], 12)
    assert (5, 7) in found
    assert all(first <= 5 and second <= 7 for first, second in found)


def test_sizes_from_the_least_on() -> None:
    """The least of a pool is tried even where it is not on the grid, and the others keep at least theirs."""
    some = [PoolPins(None, None, ((3, 1),)), PoolPins(None, None, ((1, 5), (2, 1)))]
    assert pool_sizes(some, [12, 12], 12) == [(3, 9), (4, 8), (6, 6)]
    assert pool_sizes(some, [12, 12], 7) == []


def test_ten_pools_of_a_thousand_gpus() -> None:
    """Every role by itself: 16 parts for 10 pools, of which 9 borders are chosen among 15 places."""
    found = pool_sizes([pins()] * 10, [1024] * 10, 1024)
    assert len(found) == comb(15, 9)
    assert all(sum(sizes) == 1024 for sizes in found)


def test_pins_of_a_pool() -> None:
    """Groups that the pool must contain, and its sizes where all of its roles pin how many copies they have."""
    engine = demand("rollout", parallel=frozenset({"data", "tensor"}), tensor_parallel_size=4, data_parallel_size=3)
    assert pool_pins([engine]) == PoolPins(frozenset({12}), None, ((4, 3),))
    assert pool_pins([engine, demand("actor")]) == PoolPins(None, None, ((4, 3), (1, 1)))
    assert pool_pins([engine, demand("actor", gpus=63)]) == PoolPins(frozenset({63}), 63, ((4, 3), (1, 63)))


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
