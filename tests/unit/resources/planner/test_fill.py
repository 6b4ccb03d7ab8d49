import subprocess
import sys
from collections.abc import Sequence
from itertools import permutations, product
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.resources.cluster import Cluster, Gpu, Host
from rlflow.resources.planner import placement_solver as module
from rlflow.resources.planner.placement_solver import PoolRequest, place_pools

Filled = dict[str, list[tuple[str, tuple[int, ...]]]]


def hosts(*gpus: int) -> Cluster:
    return cluster_of(*(Host(name=f"host-{i}", gpus=count, gpu="h") for i, count in enumerate(gpus)))


def cluster_of(*given_hosts: Host) -> Cluster:
    return Cluster(hosts=given_hosts, gpus={kind: Gpu(memory_gib=80, source="test") for kind in ("h", "other")})


def filled(pools: Sequence[PoolRequest], cluster: Cluster) -> Filled | None:
    found = place_pools(pools, cluster)
    if found is None:
        return None
    shares = {pool.name: share for pool, share in zip(pools, found, strict=True)}
    check(pools, cluster, shares)
    return shares


def check(pools: Sequence[PoolRequest], cluster: Cluster, shares: Filled) -> None:
    by_name = {host.name: host for host in cluster.hosts}
    order = list(by_name)
    used = [(host, gpu) for share in shares.values() for host, gpus in share for gpu in gpus]
    assert len(set(used)) == len(used), "every GPU is in one pool at most"
    assert all(gpu in by_name[host].usable for host, gpu in used)
    for pool in pools:
        share = shares[pool.name]
        places = [order.index(host) for host, _ in share]
        assert places == sorted(set(places))
        assert all(gpus and len(gpus) % pool.unit == 0 for _, gpus in share)
        total = count(share) // pool.unit
        assert total == pool.units if pool.units is not None else total >= 1
        for host, _ in share:
            assert pool.label in (None, by_name[host].gpu, *by_name[host].labels)


def count(share: list[tuple[str, tuple[int, ...]]]) -> int:
    return sum(len(gpus) for _, gpus in share)


def figures(pools: Sequence[PoolRequest], shares: Filled | None) -> tuple[int, int] | None:
    """(units of the open pool, (pool, host) pairs)."""
    if shares is None:
        return None
    opened = sum(count(shares[pool.name]) // pool.unit for pool in pools if pool.units is None)
    return opened, sum(len(share) for share in shares.values())


def brute_force(pools: Sequence[PoolRequest], cluster: Cluster) -> tuple[int, int] | None:
    """Every content of every host; of those that give the pools the same, the fewest pairs."""
    reached = {(0,) * len(pools): 0}
    for host in cluster.hosts:
        may = [pool.label in (None, host.gpu, *host.labels) for pool in pools]
        most = [len(host.usable) // pool.unit if free else 0 for pool, free in zip(pools, may, strict=True)]
        contents = [
            content
            for content in product(*(range(n + 1) for n in most))
            if sum(n * pool.unit for n, pool in zip(content, pools, strict=True)) <= len(host.usable)
        ]
        here: dict[tuple[int, ...], int] = {}
        for (totals, pairs), content in product(reached.items(), contents):
            after = tuple(map(sum, zip(totals, content, strict=True)))
            if all(p.units is None or n <= p.units for n, p in zip(after, pools, strict=True)):
                here[after] = min(here.get(after, 99), pairs + sum(n > 0 for n in content))
        reached = here
    ends = [
        (sum(n for n, pool in zip(totals, pools, strict=True) if pool.units is None), -pairs)
        for totals, pairs in reached.items()
        if all(n >= 1 if pool.units is None else n == pool.units for n, pool in zip(totals, pools, strict=True))
    ]
    return (max(ends)[0], -max(ends)[1]) if ends else None


@st.composite
def some_host(draw: st.DrawFn, name: str) -> Host:
    gpus = draw(st.integers(1, 6))
    free = draw(st.none() | st.lists(st.integers(0, gpus - 1), unique=True).map(tuple))
    labels = draw(st.sampled_from([(), (), ("fast",), ("fast", "big")]))
    kind = draw(st.sampled_from(["h", "h", "other"]))
    return Host(name=name, gpus=gpus, gpu=kind, free=free, reserved=draw(st.integers(0, 5)) == 5, labels=labels)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[PoolRequest], Cluster]:
    some = [draw(some_host(f"host-{i}")) for i in range(draw(st.integers(2, 4)))]
    if draw(st.booleans()):  # hosts that are alike
        some = [Host(name=host.name, gpus=some[0].gpus, gpu="h", labels=some[0].labels) for host in some]
    number = draw(st.integers(1, 3))
    opened = draw(st.integers(0, 2 * number))
    pools = [
        PoolRequest(
            name=name,
            unit=draw(st.integers(1, 4)),
            units=None if index == opened else draw(st.integers(1, 6)),
            label=draw(st.sampled_from([None, None, None, "fast", "big", "h"])),
        )
        for index, name in enumerate("cab"[:number])
    ]
    return pools, cluster_of(*some)


@pytest.mark.slow
@pytest.mark.parametrize("few", [50_000, -1], ids=["host by host", "alike together"])
@settings(max_examples=500, deadline=None)
@given(problem=problems())
def test_as_good_as_every_way_tried(few: int, problem: tuple[list[PoolRequest], Cluster]) -> None:
    with patch.object(module, "_FEW", few):
        assert figures(problem[0], filled(*problem)) == brute_force(*problem)


@pytest.mark.parametrize("few", [50_000, -1], ids=["host by host", "alike together"])
@settings(max_examples=50, deadline=None)
@given(problem=problems())
def test_the_order_of_pools_means_nothing(few: int, problem: tuple[list[PoolRequest], Cluster]) -> None:
    pools, cluster = problem
    with patch.object(module, "_FEW", few):
        results = [filled(order, cluster) for order in permutations(pools)]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("gpus", "unit", "units"),
    [
        ((6, 6), 4, 2),
        ((7, 5), 4, 2),
        ((4, 8, 4), 8, 1),
        ((8, 8), 6, 2),
        ((6, 6, 4), 4, 3),
        ((4, 2), 2, 3),
        ((8,) * 7 + (7,), 1, 63),
    ],
)
def test_one_pool_takes_all_whole_units(gpus: tuple[int, ...], unit: int, units: int) -> None:
    pools = [PoolRequest("rollout", unit, None)]
    assert figures(pools, filled(pools, hosts(*gpus))) == (units, sum(count >= unit for count in gpus))


@pytest.mark.parametrize("pool", [PoolRequest("a", 4, 4), PoolRequest("a", 12, None), PoolRequest("a", 12, 1)])
def test_one_pool_that_does_not_fit(pool: PoolRequest) -> None:
    assert filled([pool], hosts(6, 6, 4)) is None


def test_one_pool_takes_few_hosts_and_earlier_ones() -> None:
    assert filled([PoolRequest("a", 1, 6)], hosts(2, 4, 8, 6)) == {"a": [("host-2", (0, 1, 2, 3, 4, 5))]}
    assert filled([PoolRequest("a", 2, 5)], hosts(2, 8, 4, 8)) == {
        "a": [("host-0", (0, 1)), ("host-1", (0, 1, 2, 3, 4, 5, 6, 7))]
    }


def test_actor_4_and_rollout_12_on_two_hosts_of_8() -> None:
    pools = [PoolRequest("actor", 1, 4), PoolRequest("rollout", 4, 3)]
    assert filled(pools, hosts(8, 8)) == {
        "actor": [("host-0", (4, 5, 6, 7))],
        "rollout": [("host-0", (0, 1, 2, 3)), ("host-1", tuple(range(8)))],
    }


def test_groups_keep_to_neighbours_that_start_at_a_multiple() -> None:
    partly = cluster_of(Host(name="a", gpus=8, gpu="h", free=(7, 6, 5, 4, 3, 1)))
    pools = [PoolRequest("rollout", 4, 1), PoolRequest("actor", 1, None)]
    assert filled(pools, partly) == {"rollout": [("a", (4, 5, 6, 7))], "actor": [("a", (1, 3))]}
    torn = cluster_of(Host(name="a", gpus=9, gpu="h", free=(0, 1, 2, 4, 5, 6, 7, 8)))
    assert filled([PoolRequest("rollout", 4, 2)], torn) == {"rollout": [("a", (0, 1, 2, 8, 4, 5, 6, 7))]}


def test_partly_occupied_hosts() -> None:
    partly = cluster_of(
        Host(name="a", gpus=8, gpu="h", free=(0, 1, 2)),
        Host(name="b", gpus=8, gpu="h", free=()),
        Host(name="c", gpus=8, gpu="h", free=(2, 3, 4, 5, 6)),
    )
    assert filled([PoolRequest("rollout", 2, None)], partly) == {
        "rollout": [("a", (0, 1)), ("c", (2, 3, 4, 5))],
    }


def test_a_reserved_host_is_left_alone() -> None:
    some = cluster_of(Host(name="a", gpus=8, gpu="h", reserved=True), Host(name="b", gpus=4, gpu="h"))
    assert filled([PoolRequest("rollout", 2, None)], some) == {"rollout": [("b", (0, 1, 2, 3))]}


def test_labels_and_kinds() -> None:
    some = cluster_of(
        Host(name="a", gpus=4, gpu="h"),
        Host(name="b", gpus=4, gpu="h", labels=("fast",)),
        Host(name="c", gpus=4, gpu="other"),
    )
    pools = [PoolRequest("x", 1, 4, label="fast"), PoolRequest("y", 1, 4, label="other"), PoolRequest("z", 1, None)]
    assert filled(pools, some) == {name: [(host, (0, 1, 2, 3))] for name, host in zip("xyz", "bca", strict=True)}
    assert filled([PoolRequest("x", 1, None, label="slow")], some) is None
    assert filled([PoolRequest("x", 1, 1, label="slow"), PoolRequest("z", 1, None)], some) is None


def test_no_pools() -> None:
    assert place_pools([], hosts(8)) == []


LARGE = [(8, 20), (8, 10), (4, 30), (4, 40), (4, 10), (2, 50), (2, 20), (1, 60), (1, 30), (1, None)]


def test_128_hosts_and_10_pools() -> None:
    pools = [PoolRequest(f"pool-{i}", unit, units) for i, (unit, units) in enumerate(LARGE)]
    shares = filled(pools, hosts(*[8] * 128))
    # No GPU of 1024 is left over, and no pool is on one host more than it must.
    assert figures(pools, shares) == (1024 - 790, 20 + 10 + 15 + 20 + 5 + 13 + 5 + 8 + 4 + 30)
    assert shares == filled(pools[::-1], hosts(*[8] * 128))


def test_128_hosts_and_units_that_do_not_divide_a_host() -> None:
    odd = [(3, 40), (4, 40), (5, 20), (2, 60), (7, None)]
    pools = [PoolRequest(f"pool-{i}", unit, units) for i, (unit, units) in enumerate(odd)]
    # As proven with a count for each pool on each host, which takes a thousand times as long.
    assert figures(pools, filled(pools, hosts(*[8] * 128))) == (65, 156)


def test_large_clusters_of_several_kinds_agree_with_themselves_in_any_order() -> None:
    pools = [PoolRequest(name, unit, units) for name, unit, units in [("a", 4, 33), ("b", 3, 50), ("c", 1, None)]]
    uneven = hosts(*[8] * 50, *[7] * 6, *[6] * 4)
    results = [filled(order, uneven) for order in permutations(pools)]
    assert all(result == results[0] for result in results)
    assert figures(pools, results[0]) is not None


def test_what_is_simple_needs_no_solver() -> None:
    code = (
        "import sys; from rlflow.resources.cluster import Cluster, Gpu, Host;"
        "from rlflow.resources.planner.placement_solver import PoolRequest, place_pools;"
        "some = lambda n: Cluster(gpus={}, hosts=tuple(Host(name=str(i), gpus=8, gpu='h') for i in range(n)));"
        "assert place_pools([PoolRequest('a', 4, None)], some(128));"
        "assert place_pools([PoolRequest('a', 4, 100)], some(128));"
        "assert place_pools([PoolRequest('a', 1, 8), PoolRequest('b', 4, None)], some(4));"
        "assert 'ortools' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
