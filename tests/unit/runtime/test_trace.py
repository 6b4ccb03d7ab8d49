"""The trace of a run keeps the rules of its format and agrees with the metrics."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import rlflow
from rlflow.engines.times import Span, Times
from rlflow.errors import RecipeError
from rlflow.recipe import Trace
from rlflow.recipe.options import RunOptions
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.protocols import Engines
from rlflow.runtime.run import run
from rlflow.runtime.trace import TraceWriter, arrows, cause_of
from tests.conftest import CONFIG_DIR
from tests.helpers import load
from tests.trace_rules import arrows_of, checked_events, process_names, seconds_of


def traced(folder: Path, trace: Trace) -> list[dict[str, Any]]:
    """Run the recipe of the tests with a trace, and return its metrics."""
    plan = rlflow.compile(load("recipe=fake", config_dir=CONFIG_DIR), "local")
    run(plan, folder, LocalRuntime(), [MetricsWriter()], RunOptions(trace=trace))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "seconds" in line]


@pytest.mark.slow
def test_slices_agree_with_the_metrics(tmp_path: Path) -> None:
    metrics = traced(tmp_path, True)
    events = checked_events(tmp_path / "trace.json")
    seconds = seconds_of(events, "controller")
    for line in metrics:
        for name, value in line.items():
            # The trace also has the sync before the first step, which is not in the metrics of that step.
            if name.startswith("seconds/") and (line["step"], name) != (1, "seconds/copy"):
                assert seconds[line["step"], name.removeprefix("seconds/")] == pytest.approx(value, abs=1e-5)
        assert seconds[line["step"], "step"] == pytest.approx(line["seconds"], abs=1e-5)
    names = {name.removeprefix("seconds/") for line in metrics for name in line if name.startswith("seconds/")}
    assert {event["name"] for event in events if event["ph"] == "X"} == {*names, "step", "evaluation", "checkpoint"}


@pytest.mark.slow
def test_each_worker_has_the_calls_of_its_engine_by_node(tmp_path: Path) -> None:
    traced(tmp_path, True)
    events = checked_events(tmp_path / "trace.json")
    assert set(process_names(events).values()) == {
        "controller",
        *(f"{role}/0 on host-0, GPU 0" for role in ("actor", "rollout", "reference")),
    }
    calls = {
        (process_names(events)[event["pid"]].partition(" ")[0], event["name"], event["args"]["method"])
        for event in events
        if "method" in event.get("args", {}) and event["args"]["step"] == 2
    }
    assert {each for each in calls if each[1] != "evaluation"} == {
        ("rollout/0", "rollouts", "generate"),
        ("rollout/0", "copy", "load_weights"),
        ("reference/0", "reference", "logprobs"),
        ("actor/0", "update", "update"),
    }


@pytest.mark.slow
def test_arrows_follow_the_edges_of_the_graph(tmp_path: Path) -> None:
    traced(tmp_path, True)
    found = arrows_of(checked_events(tmp_path / "trace.json"), 2)
    assert found >= {
        ("rollouts", "rewards"),
        ("rollouts", "reference"),
        ("rewards", "advantages"),
        ("advantages", "update"),
        ("reference", "update"),
        ("update", "copy"),
    }
    assert not {("update", "rollouts"), ("rewards", "reference")} & found


@pytest.mark.slow
def test_only_chosen_steps_are_traced(tmp_path: Path) -> None:
    assert len(traced(tmp_path / "some", (2, 6))) > 2
    assert {step for step, _ in seconds_of(checked_events(tmp_path / "some" / "trace.json"), "controller")} == {2, 6}
    traced(tmp_path / "none", False)
    assert not (tmp_path / "none" / "trace.json").exists()


class Engine:
    def update(self) -> None: ...


@pytest.mark.slow
def test_a_trace_continues_when_the_run_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    plan: Any = rlflow.compile(load("recipe=fake", config_dir=CONFIG_DIR), "local")
    writer = TraceWriter(True)
    for engines in (Engines(actor=Engine()) for _ in range(2)):
        writer.follow(engines)
        writer.started(plan, tmp_path, 0)
        engines["actor"].update()
        engines.trace.add("update", 1.0, 2.0)
        writer.stepped(1, {})
        writer.close()
    slices = [event for event in checked_events(tmp_path / "trace.json") if event["ph"] == "X"]
    assert [event["name"] for event in slices].count("update") == 2 + 2


@pytest.mark.slow
def test_torch_profiles_chosen_steps_alone(tmp_path: Path) -> None:
    """One of three optimizer steps, with the forward passes of all roles in this process, and without evaluations."""
    plan = rlflow.compile(load("recipe=real", "steps=3", "evaluation.every=1", config_dir=CONFIG_DIR), "local")
    run(plan, tmp_path, LocalRuntime(), options=RunOptions(profile=(2,)))
    [path] = (tmp_path / "profiles").rglob("*.*")
    assert path.relative_to(tmp_path / "profiles") == Path("step-2/actor-0.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names.count("Optimizer.step#AdamW.step") == 1
    assert "aten::mm" in names


def test_only_steps_of_the_run_can_be_recorded(tmp_path: Path) -> None:
    plan = rlflow.compile(load("recipe=fake", config_dir=CONFIG_DIR), "local")
    for trace, fact in (
        ([0], "0 comes before the first"),
        ([-1], "-1 comes before"),
        ([2, 7], "7 comes after the last"),
    ):
        with pytest.raises(RecipeError, match=rf"(?s)trace: step {fact}.*Fix: steps from 1 to 6"):
            run(plan, tmp_path, LocalRuntime(), options=RunOptions(trace=tuple(trace)))
    with pytest.raises(RecipeError, match=r"(?s)profile: step 7 comes after the last step.*Fix: steps from 1 to 6"):
        run(plan, tmp_path, LocalRuntime(), options=RunOptions(profile=(2, 7)))


def test_each_time_is_taken_once() -> None:
    engine = Engine()
    times = Times(engine)
    engine.update()
    times.add("other", 1.0, 1.5)
    update, other = times.take()
    assert (update.name, other.name, other.end - other.start) == ("update", "other", 500_000_000)
    assert times.take() == []


def test_an_arrow_comes_from_the_last_slice_that_starts_before() -> None:
    rounds = [Span("a", 0, 10), Span("b", 5, 12), Span("a", 20, 30), Span("c", 40, 50)]
    edges = [("a", "b"), ("a", "c"), ("d", "c"), ("c", "a")]
    assert arrows(rounds, edges) == [(rounds[0], rounds[1]), (rounds[2], rounds[3])]


def test_a_call_belongs_to_the_node_that_it_overlaps_most() -> None:
    around = [Span("reference", 0, 10), Span("update", 10, 100)]
    assert cause_of(Span("logprobs", 2, 12), around) == "reference"
    assert cause_of(Span("logprobs", 9, 60), around) == "update"
    assert cause_of(Span("logprobs", 200, 210), around) == "logprobs"
