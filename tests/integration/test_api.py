"""rlflow as a library: what run() shows, hears and returns."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from tests.conftest import CONFIG_DIR


@pytest.fixture
def plan() -> Plan:
    recipe = rlflow.load(["recipe=fake", "steps=4", "evaluation.every=2"], CONFIG_DIR)
    return rlflow.compile(recipe, "local")


class Steps(rlflow.Observer):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append(step)


def test_a_run_shows_its_progress_and_returns_its_metrics(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = rlflow.run(plan, tmp_path / "run")
    shown = capsys.readouterr().out
    assert "fake: 4 steps, in " in shown
    assert "step     4  length " in shown
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert report.history() == lines
    last = next(line for line in reversed(lines) if "tokens" in line)
    assert {"step": 4, **report.metrics} == last
    assert json.loads((tmp_path / "run" / "report.json").read_text())["metrics"] == report.metrics


@pytest.mark.slow
def test_observers_take_the_place_of_the_display(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps()
    report = rlflow.run(plan, tmp_path / "run", observers=[steps], stop=lambda: len(steps.seen) == 2)
    assert (report.status, report.steps, steps.seen) == ("stopped", 2, [1, 2])
    report = rlflow.run(plan, resume=tmp_path / "run", observers=[steps])
    assert (report.status, report.steps, steps.seen) == ("finished", 4, [1, 2, 3, 4])
    assert report.directory == str(tmp_path / "run")
    assert rlflow.run(plan, resume=str(tmp_path / "run"), observers=()).metrics == {}, "no step was left"
    assert capsys.readouterr().out == ""


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'obsever'"):
        rlflow.obsever  # noqa: B018
