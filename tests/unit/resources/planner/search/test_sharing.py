"""The ways to share GPUs, counted."""

from rlflow.resources.planner.search.sharing import sharing_partitions
from tests.unit.resources.planner.planning import demand


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
