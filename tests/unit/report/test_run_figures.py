"""The figures of a run while its files grow, are torn, and are replaced."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.report.records import EventLog
from rlflow.report.run_figures import RunFiles, predicted_times
from rlflow.report.run_readers import GrowingFile
from rlflow.report.run_records import METRICS_LINE, PLAN
from tests.unit.report.test_run_page import REPORT

GRAPH: dict[str, Any] = {"rollouts": {}, "rewards": {}, "reference": {}, "update": {}}
# The reference begins when the rollouts end, and the rewards before; the update waits for both.
NODES = {
    "update": {"start": 6.0, "seconds": 2.0},
    "actor->rollout": {"start": 8.0, "seconds": 1.0},
    "rollouts": {"start": 0.0, "seconds": 4.0},
    "reference": {"start": 4.0, "seconds": 2.0},
    "rewards": {"start": 1.0, "seconds": 3.5},
}


def write_plan(folder: Path) -> None:
    plan = {"recipe": {"name": "mine", "steps": 3, "graph": GRAPH}, "nodes": NODES, "step_seconds": 9.0}
    (folder / "plan.json").write_text(json.dumps(plan))


def add(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_growing_file_gives_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(path, METRICS_LINE)
    assert file.read() == (False, [])
    path.write_text('{"step": 1}\n{"st')
    assert file.read() == (False, [{"step": 1}])
    assert file.read() == (False, [])
    with path.open("a") as other:
        other.write('ep": 2}\nnot json\n')
    assert file.read() == (False, [{"step": 2}])
    path.unlink()
    assert file.read() == (True, [])


@pytest.mark.parametrize("length", [1, 3, 9])
def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path, length: int) -> None:
    path, new = tmp_path / "metrics.jsonl", tmp_path / "new"
    add(path, *({"step": step} for step in (1, 2, 3)))
    file = GrowingFile(path, METRICS_LINE)
    file.read()
    add(new, *({"step": 10 + step} for step in range(length)))
    new.replace(path)
    assert file.read() == (True, [{"step": 10 + step} for step in range(length)])


def test_earlier_lines_are_not_read_again(tmp_path: Path) -> None:
    write_plan(tmp_path)
    path = tmp_path / "metrics.jsonl"
    files = RunFiles(tmp_path)
    assert files.figures()["curves"] == {}
    add(path, *({"step": step, "seconds": 5.0} for step in range(1, 51)))
    assert files.figures()["curves"]["seconds"][0] == list(range(1, 51))
    with path.open("r+b") as file:
        file.write(b"#" * 500)
    add(path, {"step": 51, "seconds": 7.0, "update/kl": float("nan")})
    assert files.figures()["curves"] == {"seconds": [list(range(1, 52)), [5.0] * 50 + [7.0]]}


def test_a_resumed_run_drops_the_steps_that_it_repeats_and_an_older_report(tmp_path: Path) -> None:
    write_plan(tmp_path)
    path = tmp_path / "metrics.jsonl"
    report = {**REPORT, "steps": 2, "status": "stopped", "warnings": ["late"], "eval_after": float("nan")}
    add(path, *({"step": step, "seconds": 1.0} for step in (1, 2)))
    (tmp_path / "report.json").write_text(json.dumps(report))
    files = RunFiles(tmp_path)
    first = files.figures()
    assert first["report"] == {**report, "warnings": ("late",), "eval_after": None}
    assert [event["text"] for event in first["events"]] == ["late"]
    (tmp_path / "shortened").write_text(path.read_text().splitlines(keepends=True)[0])
    (tmp_path / "shortened").replace(path)
    add(path, *({"step": step, "seconds": 2.0} for step in (2, 3)))
    figures = files.figures()
    assert figures["curves"]["seconds"] == [[1, 2, 3], [1.0, 2.0, 2.0]]
    assert (figures["report"], figures["events"]) == (None, [])


def test_measured_times_are_in_the_order_of_the_plan(tmp_path: Path) -> None:
    write_plan(tmp_path)
    times = {"rollouts": 10.0, "rewards": 2.0, "reference": 1.0, "update": 5.0, "copy": 0.5}
    add(tmp_path / "metrics.jsonl", {"step": 1, "seconds": 16.5, **{f"seconds/{k}": v for k, v in times.items()}})
    figures = RunFiles(tmp_path).figures()
    assert figures["predicted_step"]["nodes"]["copy"] == (8.0, 9.0)
    assert figures["last_steps"] == [
        {
            "step": 1,
            "seconds": 16.5,
            "nodes": {
                "rollouts": (0.0, 10.0),
                "rewards": (0.0, 2.0),
                "reference": (10.0, 11.0),
                "update": (11.0, 16.0),
                "copy": (16.0, 16.5),
            },
        }
    ]
    assert predicted_times(PLAN.validate_json('{"recipe": {"name": "mine", "steps": 3}}')) == {}


def test_engines_show_their_last_step_and_which_were_replaced(tmp_path: Path) -> None:
    write_plan(tmp_path)
    second = {"role": "rollout", "engine": 0, "seconds": 1.0, "running": 4, "waiting": 0}
    add(
        tmp_path / "engines.jsonl",
        {**second, "step": 1, "at": 100.5, "tokens": 7, "cache": 0.9, "preemptions": 0},
        {**second, "step": 2, "at": 101.5, "tokens": 10, "cache": 0.4, "preemptions": 1},
        {**second, "step": 2, "at": 102.25, "tokens": 5, "cache": 0.3, "preemptions": 2, "seconds": 0.5},
        {**second, "step": 2, "at": 101.75, "tokens": 3, "cache": 0.1, "preemptions": 0, "engine": 1},
        {"role": "rollout", "engine": 1, "step": 2, "failed": "it died"},
    )
    add(tmp_path / "events.jsonl", {"step": 5, "kind": "resumed", "text": "resumed after step 5"})
    figures = RunFiles(tmp_path).figures()
    first, second_engine = figures["engines"]
    assert first == {
        "role": "rollout",
        "engine": 0,
        "step": 2,
        "seconds": 1.5,
        "tokens": 15,
        "cache": 0.4,
        "preemptions": 3,
    }
    assert (second_engine["engine"], second_engine["tokens"]) == (1, 3)
    assert figures["engine_tokens"] == {"rollout": [[100, 101, 102], [7, 13, 5]]}
    assert [event["text"] for event in figures["events"]] == [
        "rollout: engine 1 replaced: it died",
        "resumed after step 5",
    ]


def test_samples_of_a_long_run_stay_few_and_keep_the_first_and_the_last(tmp_path: Path) -> None:
    write_plan(tmp_path)
    files = RunFiles(tmp_path)
    for start in range(1, 1000, 37):
        sample: dict[str, Any] = {"prompt": "p" * 9000, "response": "r", "choice": "best", "length": 1}
        sample |= {"finished": True, "reward": None, "reward_parts": {}, "advantage": None}
        add(tmp_path / "samples.jsonl", *({**sample, "step": step} for step in range(start, start + 37)))
        steps = [sample["step"] for sample in files.figures()["samples"]]
        assert (steps[0], steps[-1]) == (1, start + 36)
        assert len(steps) <= 40
    assert len(files.figures()["samples"][0]["prompt"]) < 4100


def test_warnings_are_logged_even_from_before_the_start(tmp_path: Path) -> None:
    log = EventLog()
    plan: Any = None
    log.warned("early")
    log.started(plan, tmp_path, 4)
    log.stepped(5, {})
    log.warned("later")
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"], line["text"]) for line in lines] == [
        (4, "resumed", "resumed after step 4"),
        (4, "warning", "early"),
        (5, "warning", "later"),
    ]
