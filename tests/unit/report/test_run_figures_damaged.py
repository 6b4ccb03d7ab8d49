"""Runs whose files are damaged: a typed error names the file, or the page says which lines it leaves out."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.cli import run_subcommand
from rlflow.report.run_figures import RunFiles
from rlflow.system.folder_lock import LOCK_FILE, locked
from tests.unit.report.test_run_page import REPORT, write_run

PLAN = {"recipe": {"name": "mine", "steps": 3}}
DEEP = '{"a":' * 3000 + "1" + "}" * 3000


def save(path: Path, content: Any) -> None:
    """Replace a file by these bytes, by this text, or by this value as JSON; by a folder for None."""
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def refused(folder: Path, name: str, fact: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the command names the file, what is wrong, and the fix, and writes no page."""
    assert run_subcommand("report", [str(folder)]) == 2
    assert capsys.readouterr().err == f"FileError: {folder / name}: {fact}.\n  Fix: {fix}.\n"
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ([], "expected an object, found []"),
        ({}, "recipe is missing"),
        ("{", "expected JSON, found other text (EOF while parsing an object at line 1 column 1)"),
        ("", "expected JSON, found other text (EOF while parsing a value at line 1 column 0)"),
        (b"\xff", "expected JSON, found other text (expected value at line 1 column 1)"),
        (b'{"recipe": "\xff"}', "expected JSON, found other text (invalid unicode code point at line 1 column 13)"),
        ({"recipe": None}, "recipe: expected an object, found None"),
        ({"recipe": []}, "recipe: expected an object, found []"),
        ({"recipe": {"name": 3, "steps": 3}}, "recipe.name: expected a valid string, found 3"),
        ({"recipe": {"name": "mine", "steps": "3"}}, "recipe.steps: expected a valid integer, found '3'"),
        ({**PLAN, "nodes": []}, "nodes: expected an object, found []"),
        ({**PLAN, "nodes": {"update": {"start": 1}}}, "nodes.update.seconds is missing"),
        ({**PLAN, "nodes": {"\x1b": 1}}, r"nodes.'\x1b': expected an object, found 1"),
        (None, "cannot be read (Is a directory)"),
    ],
)
def test_a_damaged_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, fact: str) -> None:
    folder = write_run(tmp_path / "run")
    save(folder / "plan.json", content)
    refused(folder, "plan.json", fact, "restore it from a copy, or give the folder of another run", capsys)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ([1], "expected an object, found [1]"),
        ({**REPORT, "steps": "x"}, "steps: expected a valid integer, found 'x'"),
        ({**REPORT, "warnings": [{}]}, "warnings.0: expected a valid string, found {}"),
        ({**REPORT, "nodes": {"update": None}}, "nodes.update: expected an object, found None"),
        (None, "cannot be read (Is a directory)"),
    ],
)
def test_a_damaged_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, fact: str) -> None:
    folder = write_run(tmp_path / "run")
    save(folder / "report.json", content)
    refused(folder, "report.json", fact, "move it away; the page is then that of a run that has not ended", capsys)


@pytest.mark.parametrize("name", ["plan.json", "report.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"recipe": ' + DEEP + "}"], ids=["lists", "recipe"])
def test_deep_nesting(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str) -> None:
    folder = write_run(tmp_path / "run")
    save(folder / name, content)
    assert run_subcommand("report", [str(folder)]) == 2
    start = f"FileError: {folder / name}: expected JSON, found other text (recursion limit exceeded at line 1 column "
    assert capsys.readouterr().err.startswith(start)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "engines.jsonl", "events.jsonl"])
def test_a_folder_in_place_of_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = write_run(tmp_path / "run")
    save(folder / name, None)
    fix = "move it away; a resumed run writes a new one"
    refused(folder, name, "cannot be read (Is a directory)", fix, capsys)


METRICS = {"step": 4, "seconds": 2.0, "rewards/mean": 0.5}
SAMPLE = {"step": 4, "choice": "best", "prompt": "p", "response": "r", "length": 1, "finished": True, "reward": 1.0}
SAMPLE |= {"reward_parts": {}, "advantage": None}
ACTIVITY = {"step": 4, "role": "rollout", "engine": 0, "at": 9.5, "seconds": 1.0, "tokens": 7, "cache": 0.5}
ACTIVITY |= {"preemptions": 0}
EVENT = {"step": 4, "kind": "warning", "text": "late"}


def without(line: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the line without one of its fields."""
    return {key: value for key, value in line.items() if key != name}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("metrics.jsonl", METRICS, without(METRICS, "step")),
        ("metrics.jsonl", METRICS, {**METRICS, "step": "x"}),
        ("metrics.jsonl", METRICS, {**METRICS, "step": 10**400}),
        ("metrics.jsonl", METRICS, {**METRICS, "step": 1.5}),
        ("metrics.jsonl", METRICS, {**METRICS, "seconds": "x"}),
        ("metrics.jsonl", METRICS, {**METRICS, "seconds/update": None}),
        ("metrics.jsonl", METRICS, {**METRICS, "seconds": 1e300}),
        ("metrics.jsonl", METRICS, "not JSON"),
        ("metrics.jsonl", METRICS, b"\xff\x00"),
        ("metrics.jsonl", METRICS, DEEP),
        ("samples.jsonl", SAMPLE, without(SAMPLE, "prompt")),
        ("samples.jsonl", SAMPLE, {**SAMPLE, "prompt": 3}),
        ("samples.jsonl", SAMPLE, {**SAMPLE, "step": [4]}),
        ("samples.jsonl", SAMPLE, {**SAMPLE, "reward_parts": 1}),
        ("engines.jsonl", ACTIVITY, {}),
        ("engines.jsonl", ACTIVITY, {**ACTIVITY, "tokens": "x"}),
        ("engines.jsonl", ACTIVITY, json.dumps(ACTIVITY).replace("9.5", "1e400")),
        ("engines.jsonl", ACTIVITY, {"role": "rollout", "engine": 0, "failed": "it died"}),
        ("events.jsonl", EVENT, without(EVENT, "step")),
        ("events.jsonl", EVENT, {**EVENT, "text": None}),
    ],
)
def test_a_damaged_line_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, good: Any, bad: Any
) -> None:
    folder = write_run(tmp_path / "run")
    line = bad if isinstance(bad, bytes) else (bad if isinstance(bad, str) else json.dumps(bad)).encode()
    around = json.dumps(good).encode()
    save(folder / name, around + b"\n" + line + b"\n" + around + b"\n")
    assert run_subcommand("report", [str(folder)]) == 0
    text = f"{name}: line 2 is damaged or incomplete, and left out"
    assert capsys.readouterr().err == f"{folder}/{text}.\n"
    page = (folder / "report.html").read_text()
    figures = json.loads(page.partition('id="figures">')[2].partition("</script>")[0], parse_constant=pytest.fail)
    assert figures["runs"][0]["left_out"] == [text]
    save(folder / name, around + b"\n" + around + b"\n")
    complete = RunFiles(folder).figures()
    assert complete["left_out"] == []
    assert json.loads(json.dumps({**complete, "updated": 0, "left_out": [text]})) == {
        **figures["runs"][0],
        **{"updated": 0, "recipe": complete["recipe"]},
    }


def test_a_metric_that_is_no_finite_number_is_no_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    save(folder / "metrics.jsonl", f'{{"step": 1, "a": NaN, "b": 1e400, "c": {10**400}, "d": 1, "e": "x"}}\n')
    figures = RunFiles(folder).figures()
    assert (figures["curves"], figures["left_out"]) == ({"d": [[1], [1.0]]}, [])


def test_a_torn_last_line_counts_unless_the_run_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('x\n{"step": 4, "rew')
    files = RunFiles(folder)
    both = "metrics.jsonl: 2 lines are damaged or incomplete, and left out (the first is line 5)"
    assert files.figures()["left_out"] == [both]
    with locked(folder):
        assert files.figures()["left_out"] == ["metrics.jsonl: line 5 is damaged or incomplete, and left out"]
    assert files.figures()["left_out"] == [both]


def test_a_lock_says_whether_a_run_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    files = RunFiles(folder)
    assert files.figures()["is_running"] is None
    (folder / LOCK_FILE).touch()
    assert files.figures()["is_running"] is False
    with locked(folder):
        (folder / "events.jsonl").touch()
        assert files.figures()["is_running"] is True
    assert files.figures()["is_running"] is False


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "missing" / "page.html"
    assert run_subcommand("report", [str(write_run(tmp_path / "run")), "--output", str(output)]) == 1
    assert capsys.readouterr().err == f"StorageError: {output}.writing: No such file or directory.\n"
