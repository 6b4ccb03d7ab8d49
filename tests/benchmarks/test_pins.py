"""Placement with pinned sizes, compared with brute force; ``benchmarks.pins`` has more cases."""

from dataclasses import replace

import pytest

from benchmarks.brute_force import faults, is_feasible
from benchmarks.pins import random_cases, tried
from rlflow.resources.layout import Resources
from tests.unit.resources.planner.planning import cluster, demand, place


@pytest.mark.slow
def test_random_pins_are_met_wherever_they_can_be() -> None:
    outcome = tried(random_cases(60, seed=1))
    assert (outcome.cases, outcome.refused_feasible, outcome.illegal) == (60, 0, 0)
    assert 20 <= outcome.feasible <= 40


@pytest.mark.parametrize("gpus", [60, 61, 62, 63])
def test_gpus_that_are_no_multiple_of_the_engines_groups(gpus: int) -> None:
    """Seven hosts of 8 and one of 7 hold 15 engines of 4, beside a role that uses every GPU."""
    on = cluster(*[8] * 7, 7)
    demands = [demand("actor", gpus=gpus), demand("rollout", colocate=("actor",), tensor_parallel_size=4)]
    assert is_feasible(demands, on)
    placed = place(demands, on)
    assert placed is not None
    assert placed.roles["actor"].layout.num_gpus == gpus
    assert len(placed.roles["rollout"].workers) == 15
    assert not faults(demands, on, placed.candidate.partition, placed.roles)


def test_brute_force_knows_what_does_not_fit() -> None:
    """Engines of 4 fit neither on hosts of 3, nor beside a role that has GPUs of its own and leaves only 3."""
    engine = demand("rollout", tensor_parallel_size=4)
    assert not is_feasible([engine], cluster(3, 3))
    assert is_feasible([engine], cluster(3, 4))
    actor = demand("actor", gpus=5, colocate=())
    assert not is_feasible([engine, actor], cluster(4, 4))
    assert is_feasible([engine, actor], cluster(4, 5))
    assert not is_feasible([replace(engine, pins=Resources(tensor_parallel_size=5))], cluster(8))


def test_faults_are_found() -> None:
    on = cluster(4, 4)
    demands = [demand("actor", gpus=4, colocate=()), demand("rollout", tensor_parallel_size=2)]
    placed = place(demands, on)
    assert placed is not None
    pools = placed.candidate.partition
    assert not faults(demands, on, pools, placed.roles)
    assert faults(demands, cluster(4, 3), pools, placed.roles)
    assert faults(demands, on, pools, dict.fromkeys(("actor", "rollout"), placed.roles["actor"]))
    assert faults([demand("actor", gpus=5), demands[1]], on, pools, placed.roles)
    assert faults(demands, on, [("actor", "rollout")], placed.roles)
