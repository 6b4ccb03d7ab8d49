"""An engine of vLLM with a stage on each of two simulated hosts follows its trainer, also after one part has died."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

import rlflow
from rlflow.report.records import MetricsWriter, read_lines
from rlflow.runtime.protocols import Observer
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.ray.worker import EngineWorker
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import Warnings, load, metrics_of

SHARED_PROCESSES = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PINS = (
    "recipe=real",
    "roles.rollout.engine=vllm",
    "roles.rollout.gpus=2",
    # vLLM on CPUs has no kernels for smaller heads.
    "models.policy.architecture.head_dim=32",
    "roles.rollout.pipeline_parallel_size=2",
)


class Worker(EngineWorker):
    """A worker that notes its process if it runs the part of an engine on another host than the first."""

    folder: Path

    def follow(self, engine: str, spec: Any) -> None:
        (self.folder / f"follower-{os.getpid()}").touch()
        super().follow(engine, spec)


class KillFollower(Warnings):
    """An observer that kills the part of the engine on its second host after the second step."""

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            [file] = Worker.folder.glob("follower-*")
            os.kill(int(file.name.removeprefix("follower-")), signal.SIGKILL)


@pytest.fixture(autouse=True)
def noted_workers(hosts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(Worker, "folder", tmp_path, raising=False)
    monkeypatch.setattr("rlflow.runtime.ray.role_workers.EngineWorker", Worker)


def run_on_two_hosts(steps: int, folder: Path, *observers: Observer) -> list[float]:
    """Return by how much sampler and trainer differ in each step."""
    plan = rlflow.compile(load(*PINS, f"steps={steps}", config_dir=CONFIG_DIR), "2x1@cpu")
    [engine] = plan.roles["rollout"].workers
    assert [bundle.host for bundle in engine.bundles] == ["host-0", "host-1"]
    report = run(plan, folder, RayRuntime(), [MetricsWriter(), *observers])
    assert (report.steps, report.restarts) == (steps, 0)
    return [line["update/sampler_difference"] for line in metrics_of(folder) if "update/sampler_difference" in line]


def test_it_follows_its_trainer(tmp_path: Path) -> None:
    """Both compute in float32, and only the orders of their sums differ."""
    differences = run_on_two_hosts(2, tmp_path / "run")
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert len(list(tmp_path.glob("follower-*"))) == 1


@pytest.mark.soak
def test_it_is_replaced_as_a_whole(tmp_path: Path) -> None:
    differences = run_on_two_hosts(4, tmp_path / "run", KillFollower())
    assert len(differences) == 4
    assert max(differences) < 1e-4
    assert len(list(tmp_path.glob("follower-*"))) == 2
    (line,) = (line for line in read_lines(tmp_path / "run" / "engines.jsonl") if "failed" in line)
    assert "worker 0 on host-1 died" in line["failed"]
