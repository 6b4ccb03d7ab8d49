"""The free GPUs of a Ray cluster, and the error if there are none."""

from dataclasses import replace

import pytest

from rlflow.errors import RecipeError
from rlflow.recipe.compose import cluster_of_hosts
from rlflow.runtime.ray.cluster import free_gpus
from rlflow.runtime.ray.cluster.free_gpus import none_free, select_free
from tests.unit.runtime.ray.cluster.test_binding import live

LISTING = "GPU 0: X (UUID: GPU-1)\nGPU 1: Y (UUID: GPU-2)\n"


def test_as_many_as_are_free() -> None:
    hosts = [live("a", free=3), live("b", free=0), live("c", gpus=0)]
    assert select_free(hosts, {"id of a": ["X"] * 8, "id of b": ["X"] * 8}) == {"a": ["X"] * 3, "b": []}


def test_of_several_kinds_it_is_not_known_which_are_free() -> None:
    free = select_free([live("a", free=2)], {"id of a": ["NVIDIA A10G"] * 4 + ["NVIDIA H200"] * 4})
    with pytest.raises(RecipeError, match="'a' has GPUs of several kinds"):
        cluster_of_hosts(free)


def test_hosts_with_the_same_name_are_distinguished() -> None:
    one, other = live("a"), replace(live("a"), node_id="id of other", address="10.0.0.2")
    devices = {"id of a": ["X"] * 8, "id of other": ["Y"] * 8}
    assert select_free([one, other], devices) == {"10.0.0.1": ["X"] * 8, "10.0.0.2": ["Y"] * 8}
    same = replace(other, address=one.address)
    assert select_free([one, same], devices) == {"id of a": ["X"] * 8, "id of other": ["Y"] * 8}
    # The same holds for a head without GPUs.
    assert select_free([one, replace(other, gpus=0)], devices) == {"10.0.0.1": ["X"] * 8}


def test_none_free() -> None:
    error = none_free([live("a", free=0), live("b", free=0)], {"id of a": ["8 by actor 'x' of job 01"]})
    assert str(error) == (
        "cluster: Ray has 16 GPUs, and none is free (taken: 'a': 8 by actor 'x' of job 01).\n"
        "  Fix: wait for them, stop what uses them, or plan for other hosts (cluster=2x8, or cluster=local)."
    )


def test_without_ray_the_gpus_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_gpus, "running_ray", lambda: None)
    monkeypatch.setattr("rlflow.runtime.ray.cluster.machine.gpu_listing", lambda: LISTING)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert free_gpus.free_gpus() == {"host-0": ["Y"]}
