"""The report of samples that could not be judged."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from rlflow.report.records import FailureLog


def test_each_reason_is_printed_once_and_all_are_logged(tmp_path: Path) -> None:
    told = io.StringIO()
    failures = FailureLog(Console(file=told, width=200))
    nothing: Any = None
    failures.started(nothing, tmp_path, 0)
    failures.failed(1, "rewards", {"'math' took longer than 10 s": 3, "'math' ended its process (SIGKILL)": 1})
    failures.failed(2, "rewards", {"'math' took longer than 10 s": 2})
    failures.ended(nothing)
    assert told.getvalue().splitlines() == [
        "step     1  rewards: 'math' took longer than 10 s (3)",
        "step     1  rewards: 'math' ended its process (SIGKILL) (1)",
        f"6 responses have no reward, see {tmp_path / 'failures.jsonl'}",
    ]
    lines = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert [(line["step"], sum(line["reasons"].values())) for line in lines] == [(1, 4), (2, 2)]


def test_repeated_steps_of_a_resumed_run_are_logged_once(tmp_path: Path) -> None:
    nothing: Any = None
    for step in (0, 2):
        failures = FailureLog(Console(file=io.StringIO()))
        failures.started(nothing, tmp_path, step)
        for again in range(step + 1, 4):
            failures.failed(again, "rewards", {"'math' took longer than 10 s": 1})
    lines = (tmp_path / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_of_many_reasons_a_few_are_said(tmp_path: Path) -> None:
    told = io.StringIO()
    failures = FailureLog(Console(file=told, width=200))
    nothing: Any = None
    failures.started(nothing, tmp_path, 0)
    failures.failed(1, "rewards", {f"'brief' returned nan for the response '{each}'": 1 for each in range(100)})
    assert len(told.getvalue().splitlines()) == 5
