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
from rlflow.runtime.objects.budget import Budget
from rlflow.runtime.objects.results import StoreCalls
from rlflow.runtime.ray.cluster import machine, probes
from rlflow.runtime.ray.cluster.binding import BoundPlan
from rlflow.runtime.ray.cluster.machine import Device, listed_gpus
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
CSV = f"""\
0, GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, {WHOLE}, 40960, 249, 535.129.03
1, GPU-fcf41002-68b6-5900-d7d1-74026173bb44, {WHOLE}, 40960, 4, 535.129.03
"""
# The part that is read of the output of nvidia-smi -q -x on the same host.
DETAILS = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
	<driver_version>535.129.03</driver_version>
	<gpu id="00000000:07:00.0">
		<fb_memory_usage><total>40960 MiB</total><used>249 MiB</used></fb_memory_usage>
		<mig_devices>
			<mig_device>
				<index>0</index>
				<gpu_instance_id>1</gpu_instance_id>
				<fb_memory_usage><total>20096 MiB</total><used>107 MiB</used></fb_memory_usage>
			</mig_device>
			<mig_device>
				<index>1</index>
				<gpu_instance_id>5</gpu_instance_id>
				<fb_memory_usage><total>N/A</total><used>N/A</used></fb_memory_usage>
			</mig_device>
		</mig_devices>
	</gpu>
	<gpu id="00000000:0F:00.0">
		<mig_devices>
			None
		</mig_devices>
	</gpu>
</nvidia_smi_log>
"""


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

    def test_each_has_its_own_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = {"listing": LISTING, "csv": CSV, "details": DETAILS}
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        tool = tmp_path / "nvidia-smi"
        tool.write_text(
            f"""#!/bin/sh
case "$*" in
  -L) cat {tmp_path}/listing;;
  --query-gpu=*) cat {tmp_path}/csv;;
  "-q -x") cat {tmp_path}/details;;
esac
"""
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        found, problem = machine.devices()
        assert problem is None
        assert found == [
            Device(0, f"{WHOLE} MIG 3g.20gb", 20096 / 1024, 107 / 1024, "535.129.03", 0, slice=0),
            Device(0, f"{WHOLE} MIG 2g.10gb", None, None, "535.129.03", 0, slice=1),
            Device(1, WHOLE, 40.0, 4 / 1024, "535.129.03", 0),
        ]

    def test_without_details_the_memory_is_unknown(self) -> None:
        found = machine.with_slices(machine.devices_from(CSV, ""), listed_gpus(LISTING), "")
        assert [device.memory_gib for device in found] == [None, None, 40.0]


def role_workers() -> tuple[RoleWorkers, Worker]:
    """Return a role's workers on a simulated host whose GPUs have their numbers in reverse, and the first of them."""
    plan = rlflow.compile(load("recipe=grpo_7b"), "1x8")
    bundles = plan.roles["rollout"].bundles
    placed = BoundPlan(
        group=Mock(bundle_count=len(bundles)),
        bundle_indices={bundle: index for index, bundle in enumerate(bundles)},
        gpu_ids={bundle: str(7 - bundle.gpu) for bundle in bundles},
        hosts={"host-0": live("host-0", simulated=True)},
    )
    actors = RoleWorkers(plan, "rollout", plan.recipe.models["policy"], placed, StoreCalls(Budget({})), Mock())
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
    assert actors._variables(worker)["OMP_NUM_THREADS"] == threads


class TestNumbers:
    """CUDA counts GPUs as nvidia-smi and Ray do wherever rlflow starts a process that uses them."""

    def test_workers(self) -> None:
        actors, worker = role_workers()
        variables = actors._variables(worker)
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

    def test_probes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The process of a probe counts like nvidia-smi, whatever this one does."""
        orders: list[str | None] = []
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
        monkeypatch.setattr("sys.argv", ["probes", "cuda"])
        monkeypatch.setitem(probes.PROBES, "cuda", lambda: orders.append(os.environ["CUDA_DEVICE_ORDER"]))
        monkeypatch.setattr(os, "_exit", lambda code: None)
        probes.main()
        assert orders == ["PCI_BUS_ID"]
