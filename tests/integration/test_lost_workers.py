"""Workers that are killed in the middle of a run on simulated hosts."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

import rlflow
from rlflow.batch import Prompts
from rlflow.compiler.plan import Plan
from rlflow.errors import EngineError
from rlflow.report.records import MetricsWriter, SampleLog, read_lines
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.protocols import Observer, Report
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.ray.worker import EngineWorker
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import Warnings, load, metrics_of

SHARED_PROCESSES = "hosts"
CLUSTER = "1x3@cpu+1x2@cpu"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
METHODS = {"actor": "update", "critic": "update", "reference": "logprobs"}


class Worker(EngineWorker):
    """A worker that a call of its role kills if there is a file with the name of the role."""

    folder: Path

    def build(self, engine: str, spec: Any) -> None:
        self._role = spec.role
        with (self.folder / "built").open("a") as file:
            file.write(f"{spec.role}\n")
        super().build(engine, spec)
        if engine == "vllm":
            self._submit, self._engine.submit = self._engine.submit, self._note_and_submit

    def _note_and_submit(self, samples: Prompts, *arguments: Any) -> Any:
        """Note the samples that vLLM is to generate."""
        with (self.folder / "submitted").open("a") as file:
            file.writelines(f"{key}\n" for key in samples.keys.tolist())
        return self._submit(samples, *arguments)

    def call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        if method == METHODS.get(self._role):
            with suppress(FileNotFoundError):
                (self.folder / self._role).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().call(method, *arguments, **named)


class KillAfter(Warnings):
    """An observer that has the next call of a role after a step kill its worker."""

    def __init__(self, step: int, role: str) -> None:
        super().__init__()
        self._step, self._role = step, role

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._step and not self.texts:
            (Worker.folder / self._role).touch()


@pytest.fixture(autouse=True)
def workers_with_faults(hosts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(Worker, "folder", tmp_path, raising=False)
    monkeypatch.setattr("rlflow.runtime.ray.role_workers.EngineWorker", Worker)


def plan_of(cluster: str, *overrides: str) -> Plan:
    return rlflow.compile(load("recipe=real", "steps=4", *overrides, config_dir=CONFIG_DIR), cluster)


def go(plan: Plan, folder: Path, *observers: Observer) -> Report:
    return run(plan, folder, RayRuntime(), [MetricsWriter(), SampleLog(), *observers])


def written(folder: Path) -> dict[str, Any]:
    """Return the files of a run that depend neither on time nor on its processes."""
    metrics = [
        {name: value for name, value in line.items() if not name.startswith("rollout/engines/")}
        for line in metrics_of(folder)
    ]
    weights = (folder / "model" / "actor" / "model.safetensors").read_bytes()
    return {"metrics": metrics, "samples": read_lines(folder / "samples.jsonl"), "weights": weights}


def builds(folder: Path) -> Counter[str]:
    """Return how often an engine of each role was built."""
    return Counter((folder / "built").read_text().split())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("expected")
    run(plan_of("local"), folder, LocalRuntime(), [MetricsWriter(), SampleLog()])
    return written(folder)


def test_a_lost_trainer_is_replaced(expected: dict[str, Any], tmp_path: Path) -> None:
    """The trainer dies in the fourth step, and the checkpoint is of the second. No other model is loaded again."""
    plan, kill = plan_of(CLUSTER), KillAfter(3, "actor")
    report = go(plan, tmp_path / "run", kill)
    assert written(tmp_path / "run") == expected
    assert report.restarts == 1
    (text,) = kill.texts
    assert text.startswith("step 4: role actor: worker 0 on host-")
    assert text.endswith("New workers start, and the run continues from step 2.")
    workers = {role: len(placement.workers) for role, placement in plan.roles.items()}
    assert builds(tmp_path) == Counter(workers) + Counter({"actor": workers["actor"]})


@pytest.mark.soak
def test_a_lost_reference_repeats_its_call(expected: dict[str, Any], tmp_path: Path) -> None:
    """The weights of a reference never change, so the run continues without going back."""
    plan, kill = plan_of(CLUSTER), KillAfter(2, "reference")
    report = go(plan, tmp_path / "run", kill)
    assert written(tmp_path / "run") == expected
    assert (report.restarts, kill.texts) == (0, [])
    (line,) = read_lines(tmp_path / "run" / "engines.jsonl")
    assert (line["step"], line["role"]) == (3, "reference")
    assert " died: " in line["failed"]
    workers = {role: len(placement.workers) for role, placement in plan.roles.items()}
    assert builds(tmp_path) == Counter(workers) + Counter({"reference": workers["reference"]})


@pytest.mark.soak
@pytest.mark.parametrize(
    ("role", "overrides"),
    [
        ("critic", ("algorithm=ppo", "roles.critic={engine: torch, model: policy}")),
        ("actor", ("roles.actor={engine: deepspeed, data_parallel_size: 2, zero_stage: 2, micro_batch_tokens: 64}",)),
        ("actor", ("overlap.max_staleness=1", "roles.rollout.colocate=[]")),
    ],
    ids=["two trained roles", "one of two ranks", "generation ahead"],
)
def test_all_that_trains_goes_back_together(role: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    plan, kill = plan_of(CLUSTER, *overrides), KillAfter(3, role)
    go(plan, tmp_path / "undisturbed")
    before = builds(tmp_path)
    report = go(plan, tmp_path / "run", kill)
    assert written(tmp_path / "run") == written(tmp_path / "undisturbed")
    assert report.restarts == 1
    trained = {role: len(plan.roles[role].workers) for role in plan.graph.trained_roles()}
    assert builds(tmp_path) == before + before + Counter(trained)


@pytest.mark.soak
def test_vllm_does_not_generate_again_what_a_failed_run_has_recorded(tmp_path: Path) -> None:
    """The trainer dies in its fourth update, and the checkpoint is of the second step."""
    overrides = ("roles.rollout={engine: vllm}", "models.policy.architecture.head_dim=32", "max_restarts=0")
    plan = plan_of(CLUSTER, *overrides)
    go(plan, tmp_path / "undisturbed")
    submitted = tmp_path / "submitted"
    expected = Counter(submitted.read_text().splitlines())
    submitted.unlink()
    with pytest.raises(EngineError, match="died"):
        go(plan, tmp_path / "run", KillAfter(3, "actor"))
    run(plan, tmp_path / "run", RayRuntime(), [MetricsWriter(), SampleLog()], resume=True)
    assert Counter(submitted.read_text().splitlines()) == expected
    assert written(tmp_path / "run") == written(tmp_path / "undisturbed")
