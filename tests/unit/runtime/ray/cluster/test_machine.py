"""GPUs by their numbers, and the slices that MIG makes of them."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import rlflow
from rlflow.engines.base import EngineSpec
from rlflow.errors import RecipeError
from rlflow.recipe.compose import cluster_of_hosts
from rlflow.resources.layout import Worker
from rlflow.runtime import local
from rlflow.runtime.objects.store_usage import StoreUsage
from rlflow.runtime.ray.cluster import machine
from rlflow.runtime.ray.cluster.binding import BoundPlan
from rlflow.runtime.ray.cluster.machine import listed_gpus
from rlflow.runtime.ray.role_workers import RoleWorkers
from tests.helpers import load
from tests.unit.runtime.ray.cluster.test_binding import live

# The output of nvidia-smi -L on a host with one GPU that MIG divides and one that it does not.
LISTING = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-fcf41002-68b6-5900-d7d1-74026173bb44)
"""
WHOLE = "NVIDIA A100-SXM4-40GB"


class TestSlices:
    def test_they_are_listed_below_their_gpu(self) -> None:
        cut, whole = listed_gpus(LISTING)
        assert [part.name for part in cut.slices] == [f"{WHOLE} MIG 3g.20gb", f"{WHOLE} MIG 2g.10gb"]
        assert (whole.index, whole.slices) == ("1", ())

    @pytest.mark.parametrize(
        ("visible", "names"),
        [
            (None, [f"{WHOLE} MIG 3g.20gb", WHOLE]),
            ("0", [f"{WHOLE} MIG 3g.20gb"]),
            ("1", [WHOLE]),
            ("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", [f"{WHOLE} MIG 2g.10gb"]),
            ("MIG-cba6,MIG-c6d4", [f"{WHOLE} MIG 2g.10gb", f"{WHOLE} MIG 3g.20gb"]),
            ("GPU-5d5b", [f"{WHOLE} MIG 3g.20gb"]),
            ("MIG-0000", []),
        ],
    )
    def test_a_process_sees_the_slices_that_cuda_gives_it(self, visible: str | None, names: list[str]) -> None:
        assert machine.gpus_from(LISTING, visible) == names

    def test_a_slice_is_never_planned_as_the_whole_gpu(self) -> None:
        with pytest.raises(RecipeError) as error:
            cluster_of_hosts({"host-0": machine.gpus_from(LISTING, "0")})
        assert f"the GPU '{WHOLE} MIG 3g.20gb' of 'host-0' is unknown" in str(error.value)
        assert "Fix: add gpu/NAME.yaml with memory_gib and device_name" in str(error.value)

    def test_figures_of_ones_own_make_it_a_kind_of_gpu(self, tmp_path: Path) -> None:
        file = tmp_path / "gpu" / "a100_slice.yaml"
        file.parent.mkdir()
        file.write_text(f"memory_gib: 19.6\ndevice_name: {WHOLE} MIG 3g.20gb\nsource: measured\n")
        (host,) = cluster_of_hosts({"host-0": machine.gpus_from(LISTING, "0")}, tmp_path).hosts
        assert (host.gpus, host.gpu) == (1, "a100_slice")


def role_workers() -> tuple[RoleWorkers, Worker]:
    """Return a role's workers on a simulated host whose GPUs have their numbers in reverse, and the first of them."""
    plan = rlflow.compile(load("recipe=grpo_7b", "roles.rollout.tensor_parallel_size=1"), "1x8")
    bundles = plan.roles["rollout"].bundles
    placed = BoundPlan(
        group=Mock(bundle_count=len(bundles)),
        bundle_indices={bundle: index for index, bundle in enumerate(bundles)},
        gpu_ids={bundle: str(7 - bundle.gpu) for bundle in bundles},
        hosts={"host-0": live("host-0", simulated=True)},
    )
    actors = RoleWorkers(plan, "rollout", plan.recipe.models["policy"], placed, StoreUsage({}), Mock())
    return actors, plan.roles["rollout"].workers[0]


@pytest.mark.parametrize(("limit", "threads"), [(None, "8"), ("1", "1"), ("100", "8")])
def test_simulated_hosts_share_the_cores_and_keep_the_limit(
    limit: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 cores, each of eight workers has eight."""
    monkeypatch.setattr("rlflow.runtime.ray.role_workers.num_usable_cpus", lambda: 64)
    monkeypatch.setattr("rlflow.system.processes.num_usable_cpus", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if limit:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    actors, worker = role_workers()
    assert len(worker.bundles) == 1
    assert actors._variables(worker.bundles)["OMP_NUM_THREADS"] == threads


class TestNumbers:
    """CUDA counts GPUs as nvidia-smi and Ray do wherever rlflow starts a process that uses them."""

    def test_workers(self) -> None:
        actors, worker = role_workers()
        variables = actors._variables(worker.bundles)
        assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert variables["CUDA_VISIBLE_DEVICES"] == ",".join(str(7 - bundle.gpu) for bundle in worker.bundles)

    def test_engines_of_this_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = rlflow.compile(load("recipe=grpo_tiny"), "1x1")
        orders: list[str | None] = []

        def built(engine: str, spec: EngineSpec) -> Any:
            orders.append(os.environ.get("CUDA_DEVICE_ORDER"))
            return SimpleNamespace()

        monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
        monkeypatch.setattr(local, "build", built)
        with local.LocalRuntime().start(plan, plan.recipe.models, tmp_path):
            assert set(orders) == {"PCI_BUS_ID"}
