"""Trackers: logs after a resume, failures, and names in a recipe."""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

import rlflow
from rlflow import extras
from rlflow.batch.sample import Sample
from rlflow.errors import RecipeError
from rlflow.report.records import MetricsWriter
from rlflow.report.tracker import Guard, Tracker, redact
from rlflow.report.trackers import trackers
from rlflow.report.trackers.tensorboard import TensorBoard
from rlflow.runtime.observers import Observers
from rlflow.runtime.protocols import Observer
from tests.conftest import ROOT
from tests.helpers import load

PAGE = (ROOT / "docs" / "metrics.md").read_text()
PLAN: Any = None
SAMPLE = Sample(
    choice="best",
    step=1,
    prompt_number=0,
    sample_number=0,
    prompt="1+1=",
    response="2",
    length=1,
    finished=True,
    reward=1.0,
    reward_parts={},
    advantage=None,
    oldest_version=0,
    newest_version=0,
)


class Remembering(Tracker):
    """A tracker that remembers its calls. Its runs are run-1, run-2 and so on."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, int]] = []
        self.logged: list[tuple[int, dict[str, float], int]] = []

    def open(self, plan: Any, directory: Path, run_id: str, step: int) -> str:
        self.opened.append((run_id, step))
        return run_id if step else f"run-{len(self.opened)}"

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        self.logged.append((step, dict(metrics), len(samples)))


def attempt(tracker: Tracker, folder: Path, first: int, last: int) -> None:
    """Make the steps after ``first`` up to ``last``, with an evaluation after each second one, as a run does."""
    observers: list[Observer] = [tracker, MetricsWriter()]
    for each in observers:
        each.started(PLAN, folder, first)
    for step in range(first + 1, last + 1):
        for each in observers:
            each.sampled([SAMPLE])
            each.stepped(step, {"seconds": 0.5, "loss": float(step)})
            if step % 2 == 0:
                each.measured(step, {"evaluation/reward": float(step)})
    for each in observers:
        each.close()


def test_a_resumed_run_continues_without_the_steps_that_it_repeats(tmp_path: Path) -> None:
    tracker = Remembering()
    attempt(tracker, tmp_path, 0, 5)
    attempt(tracker, tmp_path, 2, 7)
    assert tracker.opened[1:] == [("run-1", 2)]
    assert [step for step, metrics, _ in tracker.logged if "loss" in metrics] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, metrics, _ in tracker.logged if "evaluation/reward" in metrics] == [2, 4, 6]
    assert all(samples == ("loss" in metrics) for _, metrics, samples in tracker.logged)


def test_a_run_that_starts_again_is_a_new_one(tmp_path: Path) -> None:
    tracker = Remembering()
    attempt(tracker, tmp_path, 0, 3)
    attempt(tracker, tmp_path, 0, 2)
    assert [step for _, step in tracker.opened] == [0, 0]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"": "run-2"}
    assert [step for step, metrics, _ in tracker.logged if "loss" in metrics] == [1, 2, 3, 1, 2]


@pytest.mark.slow
def test_tensorboard_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is killed before its first checkpoint, starts again, and is resumed after its first step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    for attempt, (first, last, factor) in enumerate(((0, 3, 1), (0, 2, 10), (1, 3, 100))):
        # TensorBoard reads files in the order of their names, which begin with the second of their start.
        monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda start=attempt: 1e9 + start))
        tracker = TensorBoard()
        tracker.started(rlflow.compile(load("recipe=grpo_tiny"), "local"), tmp_path, first)
        for step in range(first + 1, last + 1):
            tracker.stepped(step, {"seconds": 1.0, "loss": float(factor * step)})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 10.0), (2, 200.0), (3, 300.0)]


@pytest.mark.parametrize("event", [name for name in vars(Observer) if not name.startswith("_")])
def test_every_event_is_forwarded(event: str) -> None:
    _, *parameters = inspect.signature(getattr(Observer, event)).parameters
    receiver = Mock(spec=Observer)
    for sender in (Guard("mine", receiver, print), Observers([receiver])):
        getattr(sender, event)(*parameters)
        assert receiver.mock_calls == [getattr(call, event)(*parameters)]
        receiver.reset_mock()


class Failing(Observer):
    def __init__(self) -> None:
        self.is_closed = False

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError(f"no answer from https://me:secret@tracker.example/{step}?key=sk-marked5309c")

    def close(self) -> None:
        self.is_closed = True


def test_a_tracker_that_fails_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_API_KEY", "sk-marked5309c")
    warnings: list[str] = []
    tracker = Failing()
    guard = Guard("mine", tracker, warnings.append)
    for step in (1, 2):
        guard.stepped(step, {})
    guard.close()
    assert tracker.is_closed
    assert warnings == [
        "the tracker 'mine' failed, and the run continues without it (ConnectionError: no answer from "
        "https://***@tracker.example/1?key=***)"
    ]


def test_short_values_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "true")
    assert redact("it is true that /a@b") == "it is true that /a@b"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            "wand",
            "trackers.0: no tracker 'wand'.\n  Known: tensorboard, wandb, mlflow, trackio, swanlab, "
            "package.module:Class.\n  Fix: did you mean 'wandb'?",
        ),
        ("wandb,wandb", "trackers.1: 'wandb' is named twice.\n  Fix: name it once."),
        ("'gone:Tracker'", "trackers.0: 'gone:Tracker': the module 'gone' cannot be imported ("),
    ],
)
def test_a_tracker_that_does_not_exist_is_refused_with_the_plan(
    named: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "check_extra", lambda *_: None)
    with pytest.raises(RecipeError) as raised:
        rlflow.compile(load(f"trackers=[{named}]"), "local")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(("name", "library"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_a_missing_library_is_told_with_its_command(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"wandb<0.32,>=0.31; extra == '{name}'", f"mlflow-skinny<4,>=3.17; extra == '{name}'"]
    monkeypatch.setattr(extras, "requires", lambda _: lines)
    monkeypatch.setattr(extras, "installed", lambda _: None)
    with pytest.raises(RecipeError) as raised:
        rlflow.compile(load(f"trackers=[{name}]"), "local")
    assert str(raised.value).startswith(f"trackers.0: tracker '{name}' needs {library}>=")
    assert str(raised.value).endswith(f", which is not installed.\n  Fix: pip install 'rlflow[{name}]'.")


def test_each_name_has_a_class_and_a_library() -> None:
    assert len(trackers(list(extras.TRACKERS), print)) == 5
    for name in ("wandb", "mlflow", "trackio", "swanlab"):
        assert extras.requirement_of(extras.TRACKERS[name]).specifier
        assert f"`pip install 'rlflow[{name}]'`" in PAGE


def test_the_tracker_of_the_page_writes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "my_trackers.py").write_text(text)
    importlib.invalidate_caches()
    plan = rlflow.compile(load("trackers=['my_trackers:CsvTracker']"), "local")
    (tracker,) = trackers(plan.recipe.trackers, print)
    tracker.started(plan, tmp_path, 0)
    tracker.stepped(1, {"update/loss": 0.5})
    assert (tmp_path / "metrics.csv").read_text() == "1,update/loss,0.5\n"
    assert list(json.loads((tmp_path / "trackers.json").read_text())) == ["my_trackers:CsvTracker"]


def test_a_class_that_is_no_tracker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("not_trackers")
    module.Number = int
    monkeypatch.setitem(sys.modules, "not_trackers", module)
    with pytest.raises(RecipeError, match=r"trackers\.0: 'not_trackers:Number' is not a tracker"):
        trackers(["not_trackers:Number"], print)


def test_the_commands_of_the_page_name_every_tracker() -> None:
    commands = re.findall(r"rlflow '(trackers=\[[\w,]+\])'", PAGE)
    assert {name for command in commands for name in load(command).trackers} == set(extras.TRACKERS)


def test_a_tracker_is_no_part_of_the_experiment() -> None:
    recipe = load()
    plans = [rlflow.compile(replace(recipe, trackers=names), "local") for names in ((), ("tensorboard",))]
    assert plans[0].fingerprint == plans[1].fingerprint
