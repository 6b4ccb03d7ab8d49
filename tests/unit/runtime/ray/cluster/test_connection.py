"""A Ray that cannot start is one error message."""

from typing import Any

import pytest

from rlflow.errors import PlacementError
from rlflow.recipe.compose import load_cluster
from rlflow.runtime.ray.cluster.connection import simulated


def test_a_simulated_host_that_cannot_start_is_an_error_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a plain Exception when its own processes do not answer in time."""
    from ray.cluster_utils import Cluster

    def fails(cluster: Cluster, **options: Any) -> None:
        raise Exception("Head node temp_dir not found in NodeInfo")

    monkeypatch.setattr(Cluster, "add_node", fails)
    message = r"host 'host-0' cannot be simulated \(.*temp_dir.*\)"
    with pytest.raises(PlacementError, match=message) as raised, simulated(load_cluster("2x1@cpu")):
        pytest.fail("no host has started")
    assert str(raised.value.notes["Fix"]).startswith("run it again")
