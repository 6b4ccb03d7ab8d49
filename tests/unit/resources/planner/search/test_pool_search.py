"""The best use of one pool."""

from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.hosts import select_hosts
from rlflow.resources.planner.pools import Pool, PoolShape, PoolUse, Shortage
from rlflow.resources.planner.search.pool_search import LayoutSearches, best_use
from tests.unit.resources.planner.planning import SEVEN_B, SMALL, cluster, demand, workload


def pool(gpus: int, *roles: str, model: Architecture = SEVEN_B) -> Pool:
    on = cluster(8)
    return Pool(
        demands=tuple(demand(role, model) for role in roles),
        shape=PoolShape(((gpus, 1),), gpus),
        host_set=select_hosts(on, (), {}),
    )


def used(gpus: int, *roles: str, longest: int = 4096, model: Architecture = SEVEN_B) -> PoolUse | Shortage:
    made = pool(gpus, *roles, model=model)
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


def test_roles_stay_where_all_that_they_ever_hold_fits() -> None:
    roles = ("actor", "reference", "rollout")
    staying, in_turns = used(1, *roles, model=SMALL), used(4, *roles)
    assert isinstance(staying, PoolUse)
    assert isinstance(in_turns, PoolUse)
    assert all(choice.layout.stays and not choice.layout.sleeps for choice in staying.choices.values())
    assert not any(choice.layout.stays for choice in in_turns.choices.values())
    for choice in staying.choices.values():
        assert sum(choice.idle.values()) == sum(choice.awake.values()) > 0
    rollout = staying.choices["rollout"]
    # All 256 samples at their longest, in the smallest share of the GPU.
    assert rollout.kv_tokens >= 256 * 4096
    assert rollout.layout.gpu_memory_utilization == 0.05
    # Nobody may stay where that only fits if the prediction is exact.
    assert sum(sum(choice.idle.values()) for choice in staying.choices.values()) * 1.14 <= 79.1


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
