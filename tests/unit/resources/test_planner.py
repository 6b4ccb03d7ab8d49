from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster, Gpu, Host
from rlflow.resources.layout import Demand, Resources
from rlflow.resources.planner import RolePlacement, place

ALL = frozenset({"data", "tensor", "pipeline", "sequence"})


def cluster(*gpus: int) -> Cluster:
    hosts = tuple(Host(name=f"host-{i}", gpus=count, gpu="h") for i, count in enumerate(gpus))
    return Cluster(hosts=hosts, gpus={"h": Gpu(memory_gib=80, source="test")})


def demand(
    role: str, weight_gib: float | None = None, parallel: frozenset[str] = ALL, heads: int | None = None, **wants: Any
) -> Demand:
    return Demand(
        role=role,
        engine="fake",
        parallel=parallel,
        trains=role == "actor",
        generates=role == "rollout",
        weight_bytes=int(weight_gib * 2**30) if weight_gib else None,
        num_attention_heads=heads,
        wants=Resources(**wants),
    )


def check(placed: RolePlacement) -> None:
    """Every tensor-parallel group is inside one host, and no GPU is in two of them."""
    size = placed.layout.tensor_parallel_size
    bundles = [bundle for worker in placed.workers for bundle in worker.bundles]
    assert len(set(bundles)) == len(bundles)
    for worker in placed.workers:
        for start in range(0, len(worker.bundles), size):
            assert len({bundle.host for bundle in worker.bundles[start : start + size]}) == 1


@pytest.mark.parametrize(
    ("gpus", "size", "engines"),
    [((6, 6), 4, 2), ((7, 5), 4, 2), ((4, 8, 4), 8, 1), ((8, 8), 6, 2), ((6, 6, 4), 4, 3), ((4, 2), 2, 3)],
)
def test_as_many_engines_as_hosts_hold(gpus: tuple[int, ...], size: int, engines: int) -> None:
    placed = place([demand("rollout", tensor_parallel_size=size)], cluster(*gpus))["rollout"]
    assert len(placed.workers) == engines
    check(placed)


def test_actor_4_and_rollout_12_on_two_hosts_of_8() -> None:
    demands = [demand("actor", gpus=4), demand("reference"), demand("rollout", gpus=12, tensor_parallel_size=4)]
    placed = place(demands, cluster(8, 8))
    assert len(placed["rollout"].workers) == 3
    assert len({bundle.host for worker in placed["actor"].workers for bundle in worker.bundles}) == 1
    apart = [b for role in ("actor", "rollout") for worker in placed[role].workers for b in worker.bundles]
    assert len(set(apart)) == 16
    assert placed["reference"].workers == placed["actor"].workers, "what is left open joins the role that trains"
    for each in placed.values():
        check(each)


def test_all_uneven_hosts_are_used() -> None:
    placed = place([demand("actor"), demand("rollout")], cluster(*[8] * 7, 7))
    assert {len(each.workers) for each in placed.values()} == {63}


def test_pipeline_stages_may_lie_on_two_hosts() -> None:
    rollout = demand("rollout", tensor_parallel_size=6, pipeline_parallel_size=2)
    placed = place([rollout], cluster(8, 8))["rollout"]
    assert len(placed.workers) == 1
    assert Counter(bundle.host for bundle in placed.workers[0].bundles) == {"host-0": 6, "host-1": 6}
    check(placed)


def test_the_smallest_group_whose_weights_take_a_quarter() -> None:
    placed = place([demand("rollout", weight_gib=61, heads=40)], cluster(8, 8))["rollout"]
    assert placed.layout.tensor_parallel_size == 4  # 61 / 4 = 15.25 <= 80 / 4


def test_the_heads_bound_the_group() -> None:
    placed = place([demand("rollout", weight_gib=200, heads=28)], cluster(8))["rollout"]
    assert placed.layout.tensor_parallel_size == 4  # 200 / 8 would be 25, but 28 heads are not shared by 8


def test_pinning_what_would_be_chosen_changes_nothing() -> None:
    uneven = cluster(*[8] * 7, 7)
    free = place([demand("actor"), demand("rollout", tensor_parallel_size=4)], uneven)
    pinned = place([demand("actor", gpus=63), demand("rollout", tensor_parallel_size=4)], uneven)
    assert free == pinned
    assert len(free["rollout"].workers) == 15


def test_a_larger_group_takes_of_a_pinned_pool_what_it_can() -> None:
    placed = place(
        [demand("actor", gpus=6), demand("rollout", colocate=("actor",), tensor_parallel_size=4)], cluster(8)
    )
    assert (len(placed["actor"].workers), len(placed["rollout"].workers)) == (6, 1)


def test_sequence_parallel_ranks_are_whole() -> None:
    placed = place([demand("actor", sequence_parallel_size=2)], cluster(7))["actor"]
    assert (placed.layout.data_parallel_size, placed.layout.sequence_parallel_size, len(placed.workers)) == (3, 2, 6)


def test_an_engine_that_cannot_be_spread_takes_one_gpu() -> None:
    placed = place([demand("actor", parallel=frozenset())], cluster(8))["actor"]
    assert [bundle.gpu for worker in placed.workers for bundle in worker.bundles] == [0]


@pytest.mark.parametrize(
    ("demands", "message"),
    [
        (
            [demand("rollout", tensor_parallel_size=12)],
            "roles.rollout: no host has 12 GPUs for one tensor-parallel group (12 asked, hosts have 8).\n"
            "  Fix: tensor_parallel_size 8, or pipeline_parallel_size 2 with 6 each.",
        ),
        ([demand("actor", gpus=17)], "roles.actor: 17 GPUs cannot be had from 2x8@h.\n  Free: 16 GPUs."),
        (
            [demand("actor", gpus=4), demand("rollout", gpus=16, tensor_parallel_size=4)],
            "roles.rollout: 16 GPUs in groups of 4 inside one host cannot be had from 2x8@h.\n"
            "  Free: 16 GPUs, of which asked: actor 4.",
        ),
        (
            [demand("rollout", gpus=6, tensor_parallel_size=4)],
            "roles.rollout.gpus: 6 GPUs cannot be used whole with tensor_parallel_size 4",
        ),
        (
            [demand("rollout", heads=28, tensor_parallel_size=8)],
            "roles.rollout.tensor_parallel_size: 8 GPUs cannot share the model's 28 attention heads evenly.\n"
            "  Fix: tensor_parallel_size 4.",
        ),
        (
            [demand("actor", gpus=16), demand("rollout", colocate=())],
            "roles.rollout: GPUs cannot be had from 2x8@h.\n  Free: 16 GPUs, of which asked: actor 16.",
        ),
        (
            [demand("actor", gpus=16, colocate=()), demand("rollout")],
            "roles.rollout: GPUs cannot be had from 2x8@h.\n  Free: 16 GPUs, of which asked: actor 16.",
        ),
        (
            [demand("actor", sequence_parallel_size=32)],
            "roles.actor: 32 groups of 1 GPUs are asked for, the pool has room for 16",
        ),
        (
            [demand("actor", gpus=8), demand("rollout", gpus=4, colocate=("actor",))],
            "roles.actor.gpus: actor and rollout share GPUs, but ask for 8 and 4 of them",
        ),
        (
            [demand("actor", colocate=()), demand("rollout")],
            "roles.actor.gpus: (rollout) and (actor) would each take all GPUs that are left",
        ),
        (
            [demand("actor", parallel=frozenset(), tensor_parallel_size=2)],
            "roles.actor.tensor_parallel_size: 2 is asked for, and engine 'fake' cannot be tensor-parallel",
        ),
        (
            [demand("rollout", weight_gib=800, heads=64)],
            "roles.rollout: weights of 800 GiB do not fit 8 GPUs of 80 GiB",
        ),
        ([demand("rollout", data_parallel_size=3, tensor_parallel_size=8)], "roles.rollout: 24 GPUs in groups of 8"),
    ],
)
def test_what_does_not_fit(demands: Sequence[Demand], message: str) -> None:
    with pytest.raises(PlacementError) as raised:
        place(demands, cluster(8, 8))
    assert str(raised.value).startswith(message)


hosts = st.lists(st.integers(1, 6), min_size=1, max_size=3)
pinned = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=2)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(free=hosts, pools=pinned, open_unit=st.integers(1, 4))
def test_equal_to_brute_force(free: list[int], pools: list[tuple[int, int]], open_unit: int) -> None:
    """Every way to put the units of the pinned pools on hosts is tried: ours exists when one does, and leaves the
    open role as many engines as the best of them."""
    demands = [
        demand(f"pinned{i}", gpus=size * count, tensor_parallel_size=size) for i, (size, count) in enumerate(pools)
    ]
    demands.append(demand("rollout", tensor_parallel_size=open_unit))
    takes_all = sum(size * count for size, count in pools) == sum(free)
    best = brute_force(free, pools, open_unit)
    if takes_all:
        return  # the open role then joins another pool
    if best == 0 or open_unit > max(free) or any(size > max(free) for size, _ in pools):
        with pytest.raises(PlacementError):
            place(demands, cluster(*free))
        return
    placed = place(demands, cluster(*free))
    assert len(placed["rollout"].workers) == best
    taken = [bundle for each in placed.values() for worker in each.workers for bundle in worker.bundles]
    assert len(set(taken)) == len(taken)
    for each in placed.values():
        check(each)


def brute_force(free: list[int], pools: list[tuple[int, int]], open_unit: int) -> int:
    """The most engines of the open role; 0 when the pools do not fit."""
    ways = [
        [split for split in product(range(count + 1), repeat=len(free)) if sum(split) == count] for _, count in pools
    ]
    best = 0
    for choice in product(*ways):
        left = list(free)
        for (size, _), split in zip(pools, choice, strict=True):
            left = [gpus - units * size for gpus, units in zip(left, split, strict=True)]
        if min(left) >= 0:
            best = max(best, sum(gpus // open_unit for gpus in left))
    return best
