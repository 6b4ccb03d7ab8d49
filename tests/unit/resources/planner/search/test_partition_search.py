"""All sizes of one way to share GPUs."""

from typing import Any

import pytest

from rlflow.resources.planner.candidate import Candidate
from rlflow.resources.planner.confidence import Margin
from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.pools import PoolUse
from rlflow.resources.planner.search.partition_search import PartitionSearch
from rlflow.resources.planner.search.pool_cache import PoolCache
from rlflow.resources.planner.search.sharing import sharing_partitions
from tests.unit.resources.planner.planning import SEVEN_B, cluster, demand, workload

ROLES = ("actor", "reference", "rollout")


@pytest.mark.parametrize(
    ("gpus", "pins"),
    [((8, 8), {}), ((3, 1), {}), ((8, 7), {"offload": "weights"}), ((4,), {"data_parallel_size": 2})],
    ids=["plenty", "tight", "offloaded", "pinned"],
)
def test_the_fastest_come_first(gpus: tuple[int, ...], pins: dict[str, Any]) -> None:
    """The safest and shortest come first: sizes are tried in the order of bounds that no use of a pool is below."""
    demands = [demand(role, SEVEN_B, **(pins if role == "actor" else {})) for role in ROLES]
    cache = PoolCache(PlannerInputs.of(demands, workload(demands), cluster(*gpus), {}))
    num_fitting = 0
    for partition in sharing_partitions(demands):
        search = PartitionSearch(partition, cache)
        candidates = list(search.candidates())
        order = sorted(candidates, key=_order)
        assert list(search.fastest_first()) == order
        for plan in candidates:
            for roles, count, use in zip(partition, plan.gpus, plan.uses, strict=True):
                least = cache.least_seconds(roles, count)
                assert least.keys() == use.seconds.keys()
                assert all(0 < least[node] <= seconds for node, seconds in use.seconds.items())
        num_fitting += len(candidates)
    assert num_fitting > 1


def test_a_bound_holds_where_roles_sleep() -> None:
    """Models that share GPUs with engines sleep where memory is short, which takes time."""
    demands = [demand(role, SEVEN_B) for role in ROLES]
    cache = PoolCache(PlannerInputs.of(demands, workload(demands, longest=16384), cluster(8, 8), {}))
    for count in (2, 4, 8, 15, 16):
        use = cache.use(ROLES, count)
        if isinstance(use, PoolUse):
            least = cache.least_seconds(ROLES, count)
            assert all(least[node] <= seconds for node, seconds in use.seconds.items())
    assert isinstance(use, PoolUse)


def _order(plan: Candidate) -> tuple[Margin, float, int, tuple[int, ...]]:
    return plan.margin, plan.schedule.step_seconds, plan.used_gpus, plan.gpus
