"""All sizes of one way to share GPUs."""

from rlflow.resources.planner.inputs import PlannerInputs
from rlflow.resources.planner.search.partition_search import PartitionSearch
from rlflow.resources.planner.search.pool_cache import PoolCache
from tests.unit.resources.planner.planning import SEVEN_B, cluster, demand, workload


def test_the_fastest_come_first() -> None:
    """The steps of all sizes at once are those of their own schedules, and the safest and shortest come first."""
    demands = [demand(role, SEVEN_B) for role in ("actor", "reference", "rollout")]
    cache = PoolCache(PlannerInputs.of(demands, workload(demands), cluster(8, 8), {}))
    for partition in ((("reference", "rollout"), ("actor",)), (("reference",), ("rollout",), ("actor",))):
        search = PartitionSearch(partition, cache)
        ordered = [(plan.margin, plan.schedule.step_seconds) for plan in search.fastest_first()]
        assert ordered == sorted((plan.margin, plan.schedule.step_seconds) for plan in search.candidates())
        assert len(ordered) > 1
