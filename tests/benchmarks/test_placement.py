"""Random plans on simulated hosts: Ray gives every engine exactly the GPUs that are planned."""

import pytest

from benchmarks.placement import Outcome, random_plans, tried
from rlflow.recipe.compose import load_cluster
from rlflow.runtime.ray.cluster.connection import simulated
from tests.conftest import HOSTS as SHARED_HOSTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHARED_PROCESSES = "hosts"


def check(outcome: Outcome, plans: int) -> None:
    assert outcome.plans == plans
    assert outcome.mismatches == outcome.split == 0
    assert outcome.engines > 0


def test_hosts_of_different_sizes(hosts: None) -> None:
    check(tried(random_plans(load_cluster(SHARED_HOSTS), 8, seed=0)), 8)


@pytest.mark.soak
@pytest.mark.parametrize("shape", ["1x4@cpu+1x3@cpu", "2x8@cpu", "1x4@cpu+1x8@cpu+1x7@cpu+1x2@cpu"])
def test_larger_hosts(shape: str) -> None:
    cluster = load_cluster(shape)
    with simulated(cluster):
        check(tried(random_plans(cluster, 100, seed=len(shape))), 100)
