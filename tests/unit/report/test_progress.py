"""The progress of a run on a terminal: known figures, in two lines below the bar."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rlflow
from rlflow.report.progress import ProgressDisplay, sparkline
from rlflow.runtime.protocols import Report
from tests.helpers import load

METRICS = {"seconds": 4.0, "rewards/mean": 0.5, "rollouts/length_mean": 12.0, "update/kl": 0.1, "tokens_per_second": 99}
REPORT = Report(
    name="x",
    fingerprint="f",
    status="finished",
    directory="",
    steps=2,
    seconds=3.0,
    eval_before=None,
    eval_after=None,
    store={},
    warnings=(),
    models={},
)


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([float("nan")], ""),
        ([3.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 7.0, float("inf"), 3.0], "▁█▄"),
        (list(range(8)), "▁▂▃▄▅▆▇█"),
        # The line has twenty means of two steps each, and every other mean is high.
        ([0.0, 0.0, 1.0, 1.0] * 10, "▁█" * 10),
    ],
)
def test_a_sparkline_has_a_character_for_each_equal_part(values: list[float], drawn: str) -> None:
    assert sparkline(values) == drawn


def terminal_lines(folder: Path, steps: list[dict[str, float]], *, done: int = 0, encoding: str = "utf-8") -> list[str]:
    """Return the lines that a terminal shows after these steps."""
    plan = rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu")
    plan = replace(plan, prediction=replace(plan.prediction, step_seconds=2.5))
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding), force_terminal=True, width=120)
    display = ProgressDisplay(console)
    display.started(plan, folder, done)
    for number, metrics in enumerate(steps, done + 1):
        display.stepped(number, metrics)
    assert display._bar is not None
    lines = [console.render_str(str(each)).plain for each in display._bar.get_renderables()]
    display.close()
    return lines[1:]


def test_a_terminal_shows_the_curve_and_the_time_beside_the_predicted_one(tmp_path: Path) -> None:
    first, second = terminal_lines(tmp_path, [{**METRICS, "rewards/mean": reward} for reward in (0.0, 0.7, 0.3)])
    assert first == "length 12.0  reward 0.300  kl 0.1000  tokens/s 99"
    assert second == f"reward {'▁█▄':<20}  step 4.0 s (predicted 2.5 s)"


def test_engines_memory_and_staleness_are_shown_where_they_are_known(tmp_path: Path) -> None:
    known = {"rollout/engines/tokens_per_second": 1234.4, "memory/fullest": 0.873, "overlap/staleness_mean": 0.75}
    (_, line) = terminal_lines(tmp_path, [{**METRICS, **known}])
    assert line.endswith("rollout 1234 tokens/s per engine  memory 87%  staleness 0.8")


def test_a_resumed_run_draws_its_curve_from_the_start(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "evaluation/reward": 1.0}]
    lines += [{"step": step, "rewards/mean": step / 8} for step in range(7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert terminal_lines(tmp_path, [{**METRICS, "rewards/mean": 7 / 8}], done=7)[1].startswith("reward ▁▂▃▄▅▆▇█ ")


def test_a_terminal_without_these_characters_shows_no_curve(tmp_path: Path) -> None:
    assert terminal_lines(tmp_path, [METRICS], encoding="ascii")[1] == "step 4.0 s (predicted 2.5 s)"


def test_the_end_names_the_page_that_was_written(tmp_path: Path) -> None:
    output = io.StringIO()
    display = ProgressDisplay(Console(file=output, width=200))
    display.started(rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu"), tmp_path, 0)
    display.ended(REPORT)
    assert "report:" not in output.getvalue()
    (tmp_path / "report.html").touch()
    display.ended(REPORT)
    assert f"report: {tmp_path}/report.html" in output.getvalue()
