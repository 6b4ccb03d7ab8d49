"""Runs that lose workers and hosts, on a runtime of this process that only reports the losses."""

import json
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlflow
from rlflow.batch import Packed
from rlflow.compiler import compile_recipe
from rlflow.compiler.continuation import experiment_of
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.engines.fake import FakeEngine
from rlflow.errors import EngineError, PlacementError
from rlflow.recipe import Model, Recipe, Role
from rlflow.recipe.compose import load_cluster
from rlflow.recipe.options import RunOptions
from rlflow.report.records import MetricsWriter, SampleLog, read_lines
from rlflow.runtime import recovery
from rlflow.runtime.checkpoint import RunProgress
from rlflow.runtime.engine_specs import spec_of
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.observers import Observers
from rlflow.runtime.protocols import Engines, Lost
from rlflow.runtime.run import run
from rlflow.runtime.session import Session
from tests.conftest import CONFIG_DIR
from tests.helpers import Warnings, load, metrics_of, prompts, save_checkpoint

DIED = "role actor: worker 0 on host-0 died."
ACTOR = Lost(processes=["role actor: worker 0 on host-0"])
HOST = Lost(processes=["role rollout: worker 1 on host-1"], hosts=["host-1"])


def plan_of(cluster: str, *overrides: str) -> Plan:
    return rlflow.compile(load("recipe=fake", *overrides, config_dir=CONFIG_DIR), cluster)


class Dying(FakeEngine):
    """An engine of the actor that fails in its updates with these numbers, each once."""

    at: set[int]

    def update(self, *arguments: Any) -> Any:
        self.calls = getattr(self, "calls", self._weight) + 1
        if self.calls in self.at:
            self.at.remove(self.calls)
            raise EngineError(DIED)
        return super().update(*arguments)


class LosingEngines(Engines):
    """Engines of this process that have lost what their runtime says."""

    def __init__(self, runtime: "LosingRuntime", plan: Plan, models: Mapping[str, Model]) -> None:
        self._runtime, self._plan, self._models = runtime, plan, models
        self.update({role: self._build(role) for role in plan.roles})

    def find_lost(self) -> Lost:
        return self._runtime.lost

    def restart_lost(self) -> None:
        self["actor"] = self._build("actor")

    def _build(self, role: str) -> Any:
        spec = spec_of(self._plan, role, self._models[self._plan.recipe.roles[role].model], device="cpu")
        return Dying(spec) if role == "actor" else FakeEngine(spec)


class LosingRuntime(LocalRuntime):
    """A runtime of this process for any plan. ``starts`` has the plan of each start."""

    def __init__(self, lost: Lost, missing: int = 0) -> None:
        """Set the losses that engines report, and for how many starts after the first a host is ``missing``."""
        self.lost, self.missing = lost, missing
        self.starts: list[Plan] = []
        self.engines: list[Engines] = []

    def check(self, plan: Plan) -> None:
        pass

    @contextmanager
    def start(self, plan: Plan, models: Mapping[str, Model], directory: Path) -> Iterator[Engines]:
        self.starts.append(plan)
        if len(self.starts) > 1 and len(self.starts) - 1 <= self.missing:
            raise PlacementError("cluster", "Ray has none for 'host-1'")
        self.engines.append(LosingEngines(self, plan, models))
        yield self.engines[-1]


def written(folder: Path) -> dict[str, Any]:
    """Return the files of a run that do not depend on time."""
    final = folder / "checkpoints" / "step-000006" / "actor" / "state.json"
    return {
        "metrics": metrics_of(folder),
        "samples": read_lines(folder / "samples.jsonl"),
        "state": final.read_text(),
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("expected")
    run(plan_of("local"), folder, LocalRuntime(), [MetricsWriter(), SampleLog()])
    return written(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "continues_from"), [(1, 0), (2, 0), (3, 2), (6, 4)])
def test_a_run_goes_back_to_its_last_checkpoint_and_ends_as_if_nothing_had_happened(
    step: int, continues_from: int, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a checkpoint goes back to its initial weights. Checkpoints are saved after every second step."""
    monkeypatch.setattr(Dying, "at", {step}, raising=False)
    runtime, warnings = LosingRuntime(ACTOR), Warnings()
    report = run(plan_of("local"), tmp_path, runtime, [MetricsWriter(), SampleLog(), warnings])
    assert written(tmp_path) == expected
    assert (report.restarts, len(runtime.starts)) == (1, 1)
    assert json.loads((tmp_path / "report.json").read_text())["restarts"] == 1
    (text,) = (warning for warning in warnings.texts if DIED in warning)
    assert text == (f"step {step}: {DIED} New workers start, and the run continues from step {continues_from}.")
    assert report.warnings == warnings.texts


@pytest.mark.slow
def test_what_a_rank_writes_until_it_is_replaced_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = tmp_path / "checkpoints" / ".step-000004-abcdefgh"
    restart = LosingEngines.restart_lost

    def write_and_restart(self: LosingEngines) -> None:
        (unfinished / "step-000004").mkdir(parents=True)
        restart(self)

    monkeypatch.setattr(LosingEngines, "restart_lost", write_and_restart)
    monkeypatch.setattr(Dying, "at", {3}, raising=False)
    assert run(plan_of("local"), tmp_path, LosingRuntime(ACTOR), []).restarts == 1
    assert not unfinished.exists()


@pytest.mark.slow
def test_nothing_of_the_failed_step_stays_in_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation ahead may wait for its room, and the recovery for that generation."""
    update, restart = Dying.update, LosingEngines.restart_lost
    batches: list[weakref.ref[Any]] = []

    def noted_update(self: Dying, batch: Any, *arguments: Any) -> Any:
        batches.append(weakref.ref(batch))
        return update(self, batch, *arguments)

    def checked_restart(self: LosingEngines) -> None:
        assert len(batches) == 3
        assert [batch() for batch in batches] == [None] * 3
        restart(self)

    monkeypatch.setattr(Dying, "update", noted_update)
    monkeypatch.setattr(LosingEngines, "restart_lost", checked_restart)
    monkeypatch.setattr(Dying, "at", {3}, raising=False)
    assert run(plan_of("local"), tmp_path, LosingRuntime(ACTOR), []).restarts == 1


@pytest.mark.slow
@pytest.mark.parametrize("placement", [("local",), ("2x1@cpu", "roles.rollout.colocate=[]")], ids=["shared", "own"])
def test_steps_that_are_generated_ahead_are_repeated(
    placement: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines share GPUs with training, or a thread generates on GPUs of their own."""
    plan = plan_of(*placement, "overlap.max_staleness=1")
    assert plan.takes_turns == (placement == ("local",))
    for name, at in (("undisturbed", set[int]()), ("run", {4})):
        monkeypatch.setattr(Dying, "at", at, raising=False)
        report = run(plan, tmp_path / name, LosingRuntime(ACTOR), [MetricsWriter(), SampleLog()])
        assert report.restarts == (name == "run")
    assert written(tmp_path / "run") == written(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_lost_host_is_left_out(expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engines train the same on any number of hosts."""
    monkeypatch.setattr(Dying, "at", {4}, raising=False)
    runtime, warnings = LosingRuntime(HOST), Warnings()
    plan = plan_of("2x1@cpu", "elastic=true")
    report = run(plan, tmp_path, runtime, [MetricsWriter(), SampleLog(), warnings])
    assert written(tmp_path) == expected
    assert report.restarts == 1
    assert [each.cluster.shape for each in runtime.starts] == ["2x1@cpu", "1x1@cpu"]
    (text,) = warnings.texts
    assert text.startswith(f"step 4: {DIED} Lost: host 'host-1'. The run is planned again for 1x1@cpu (")
    assert text.endswith("), and the run continues from step 2.")


@contextmanager
def session(plan: Plan, folder: Path, runtime: LosingRuntime, *, stopped: bool = False) -> Iterator[Session]:
    """Start a run that has made no step."""
    recipe, nothing = plan.recipe, Packed.from_rows([], np.int32)
    started = Session(
        plan=plan,
        directory=folder,
        runtime=runtime,
        options=RunOptions(),
        stop=lambda: stopped,
        observer=Observers([]),
        models=recipe.models,
        local_data=DataSource(recipe.data, recipe.seed, [], nothing, None, {"": prompts(())}),
        last=None,
        progress=RunProgress(experiment_of(recipe), 0, 0, {}),
        warnings=[],
    )
    with started.running:
        started.start()
        yield started


def lose(run: Session) -> None:
    """Have the run fail after the losses of its runtime."""
    recovery.recover(run, EngineError(DIED))


@pytest.mark.parametrize(
    ("lost", "stopped", "override"),
    [
        (Lost(), False, "max_restarts=2"),
        (ACTOR, True, "max_restarts=2"),
        (ACTOR, False, "max_restarts=0"),
        (HOST, False, "max_restarts=2"),
    ],
    ids=["an engine fails", "asked to stop", "no restarts", "a host of its own"],
)
def test_a_run_that_cannot_recover_ends(lost: Lost, stopped: bool, override: str, tmp_path: Path) -> None:
    runtime = LosingRuntime(lost)
    with (
        pytest.raises(EngineError, match=f"^{re.escape(DIED)}$"),
        session(plan_of("local", override), tmp_path, runtime, stopped=stopped) as run,
    ):
        lose(run)
    assert (run.restarts, run.warnings, len(runtime.starts)) == (0, [], 1)


def test_a_run_that_goes_back_to_the_same_checkpoint_too_often_ends(tmp_path: Path) -> None:
    """A worker that runs out of memory does so again. A new checkpoint shows that the run gets further."""
    plan = plan_of("local")
    with session(plan, tmp_path, LosingRuntime(ACTOR)) as run:
        for _ in range(2):
            lose(run)
        save_checkpoint(tmp_path, replace(run.progress, step=2, rows=6), {"actor": run.engines["actor"]}, keep=1)
        for _ in range(2):
            lose(run)
        with pytest.raises(EngineError, match=DIED) as raised:
            lose(run)
    assert raised.value.__notes__ == ["the run has gone back to step 2 as often as max_restarts=2 allows"]
    assert run.restarts == 4
    assert [text.split()[-1] for text in run.warnings] == ["0.", "0.", "2.", "2."]
    assert run.progress.step == 2


def test_rows_continue_from_the_checkpoint(tmp_path: Path) -> None:
    """The run started at step 0, and continues from a checkpoint of step 4."""
    with session(plan_of("local"), tmp_path, LosingRuntime(ACTOR)) as run:
        save_checkpoint(tmp_path, replace(run.progress, step=4, rows=14), {"actor": run.engines["actor"]}, keep=1)
        lose(run)
        assert run.data.resumed_at == (4, 14)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    with session(plan_of("local"), tmp_path, LosingRuntime(ACTOR)) as run:
        for step in (2, 4):
            save_checkpoint(tmp_path, replace(run.progress, step=step), {"actor": run.engines["actor"]}, keep=2)
        (tmp_path / "checkpoints" / "step-000004" / "actor" / "state.json").write_text("{}")
        lose(run)
        assert run.progress.step == 2
    assert "step-000004 is damaged" in run.warnings[0]


def test_a_run_ends_if_no_plan_fits_the_hosts_that_are_left(tmp_path: Path) -> None:
    plan = plan_of("2x1@cpu", "elastic=true", "roles.rollout.gpus=2")
    with (
        pytest.raises(EngineError, match=r"No plan fits the hosts that are left\. roles\.rollout\.gpus: ") as raised,
        session(plan, tmp_path, LosingRuntime(HOST)) as run,
    ):
        lose(run)
    assert str(raised.value).startswith(DIED)
    assert "Fix: " in str(raised.value)


@pytest.mark.slow
def test_a_new_plan_keeps_names_of_hosts(tmp_path: Path) -> None:
    """The ZeRO stage may change, since checkpoints fit any."""
    recipe = load("recipe=grpo_7b", "elastic=true")
    three = load_cluster("3x8@h200")
    named = replace(three, hosts=tuple(replace(host, name=f"rack-{host.name}") for host in three.hosts))
    plan = compile_recipe(replace(recipe, roles=pinned(recipe, zero_stage=2)), named)
    with session(replace(plan, recipe=recipe), tmp_path, LosingRuntime(replace(HOST, hosts=["rack-host-1"]))) as run:
        lose(run)
        assert [host.name for host in run.plan.cluster.hosts] == ["rack-host-0", "rack-host-2"]
        assert run.plan.roles == compile_recipe(recipe, run.plan.cluster).roles
        assert run.plan.recipe == recipe


def pinned(recipe: Recipe, zero_stage: int) -> dict[str, Role]:
    return {**recipe.roles, "actor": replace(recipe.roles["actor"], zero_stage=zero_stage)}


def test_a_run_waits_for_a_host_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_POLL_S", 0.0)
    runtime = LosingRuntime(replace(HOST, hosts_may_return=True), missing=3)
    with session(plan_of("2x1@cpu"), tmp_path, runtime) as run:
        lose(run)
    assert len(runtime.starts) == 5
    assert run.warnings == [
        f"{DIED} Lost: host 'host-1'. The run waits 10 minutes for its return (elastic=true continues without it),"
        " and the run continues from step 0."
    ]


def test_a_host_that_does_not_come_back_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_HOST_WAIT_S", 0.0)
    runtime = LosingRuntime(replace(HOST, hosts_may_return=True), missing=3)
    with pytest.raises(EngineError, match=DIED), session(plan_of("2x1@cpu"), tmp_path, runtime) as run:
        lose(run)
    assert len(runtime.starts) == 2
