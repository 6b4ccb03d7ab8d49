"""The check that the object stores of the hosts are large enough for a plan."""

import pytest

import rlflow
from rlflow.errors import PlacementError
from rlflow.resources.layout import GIB
from rlflow.runtime.objects.budget import StoreLimit, check_limits
from tests.conftest import CONFIG_DIR
from tests.helpers import load

PLAN = rlflow.compile(load("recipe=fake", config_dir=CONFIG_DIR), "2x1@cpu")
PEAKS = {host: gib * GIB for host, gib in PLAN.prediction.data.store_peak_gib.items()}


def limits(nbytes: float) -> dict[str, StoreLimit]:
    return {host.name: StoreLimit(host.name, int(nbytes)) for host in PLAN.cluster.hosts}


def test_a_store_that_is_large_enough() -> None:
    check_limits(PLAN, limits(max(PEAKS.values()) + 64))


def test_a_step_that_does_not_fit() -> None:
    with pytest.raises(PlacementError, match=r"data\.batch_size: a step is predicted to need 0\.00 GiB") as caught:
        check_limits(PLAN, limits(max(PEAKS.values()) - 1))
    assert "--object-store-memory, or make batch_size, group_size or max_tokens smaller" in str(caught.value)


def test_a_sample_that_does_not_fit() -> None:
    said = r"graph\.rollouts\.max_tokens: a response of 4 tokens is 0\.00 GiB, and batches may take 0\.00 GiB"
    with pytest.raises(PlacementError, match=said):
        check_limits(PLAN, limits(47))
