"""Runs as a page: what is on it comes from the files of the runs, and a browser draws it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from rlflow.cli import run_subcommand
from rlflow.errors import RecipeError
from rlflow.report.run_figures import RunFiles
from rlflow.report.run_page import differences, run_page
from tests.browser import assert_accessible, assert_prints, needs_browser, open_page

REPORT = {
    "status": "finished",
    "steps": 3,
    "seconds": 3.5,
    "eval_before": 0.25,
    "eval_after": 0.75,
    "step": {"predicted": 2.0, "measured": 3.0},
    "nodes": {"update": {"predicted": 1.0, "measured": None}},
    "memory": {"local": {"update": {"predicted": 0.5, "measured": 0.6}}},
    "store": {},
    "warnings": ["two prompts were too long"],
}
TURNS = [
    {"role": "model", "segment": 0, "tokens": 8, "reward": 0.0},
    {"role": "environment", "segment": 0, "tokens": 3, "reward": None},
    {"role": "model", "segment": 1, "tokens": 5, "reward": 1.0},
]


def write_run(folder: Path, steps: int = 3, **recipe: Any) -> Path:
    """Write the files of a run whose reward is a tenth of the step."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"recipe": {"name": "mine", "steps": steps, **recipe}}))
    lines = [{"step": 0, "evaluation/reward": 0.25}]
    lines += [{"step": step, "rewards/mean": step / 10, "tokens": 7} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "report.json").write_text(json.dumps({**REPORT, "steps": steps}))
    samples: list[dict[str, Any]] = [
        {
            **{"step": step, "choice": choice, "prompt": f"question {step}", "response": f"<b>{choice}</b> {step}"},
            **{"reward": 1.0, "reward_parts": {}, "advantage": None, "length": 4, "finished": True},
            **({"turns": TURNS, "turn_seconds": [[1.0, 2.0], [4.0, 1.0]]} if choice == "best" else {}),
        }
        for step in range(1, steps + 1)
        for choice in ("random", "best")
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    return folder


def test_curves_have_the_steps_and_values_of_the_metrics(tmp_path: Path) -> None:
    figures = RunFiles(write_run(tmp_path / "run")).figures()
    assert figures["curves"] == {
        "evaluation/reward": [[0], [0.25]],
        "rewards/mean": [[1, 2, 3], [0.1, 0.2, 0.3]],
        "tokens": [[1, 2, 3], [7, 7, 7]],
    }
    assert figures["report"] == {**REPORT, "warnings": ("two prompts were too long",)}
    assert len(figures["samples"]) == 6


@pytest.mark.slow
def test_a_long_run_keeps_its_first_and_last_points_and_the_page_stays_small(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=20_000)
    steps, values = RunFiles(folder).figures()["curves"]["rewards/mean"]
    assert (steps[0], steps[-1], values[-1]) == (1, 20_000, 2000.0)
    assert len(steps) == len(values) == 400
    assert steps == sorted(set(steps))
    assert len(run_page([folder])) < 200_000


def test_a_run_that_has_not_ended_has_a_page_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "report.json").unlink()
    (folder / "samples.jsonl").unlink()
    figures = RunFiles(folder).figures()
    assert (figures["report"], figures["samples"]) == (None, [])


def test_recipes_differ_at_paths() -> None:
    recipes: list[dict[str, Any]] = [{"a": {"b": 1, "c": [1]}, "d": {}}, {"a": {"b": 2, "c": [1]}, "e": "x"}]
    assert differences(recipes) == {"a.b": ["1", "2"], "d": ["{}", ""], "e": ["", '"x"']}
    assert differences(recipes[:1]) == {}


def test_the_command_writes_a_page_or_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    assert run_subcommand("report", [*map(str, folders), "--output", str(tmp_path / "both.html")]) == 0
    assert '"differences": {"seed": ["0", "1"]}' in (tmp_path / "both.html").read_text()
    assert run_subcommand("report", [str(folders[0])]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "both.html"), str(folders[0] / "report.html")]
    assert run_subcommand("report", [str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="holds no run"):
        run_page([tmp_path / "nowhere"])


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = run_page([write_run(tmp_path / "run")])
    assert not re.search(r"src=|@import|fetch\(|XMLHttpRequest|{{", page)
    # The head of the library names its source in a comment.
    assert re.findall(r"https?:[^\s]*", page) == ["https://github.com/leeoniya/uPlot"]


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_curves_and_shows_samples_as_text(tmp_path: Path, chromium: Browser) -> None:
    folders = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    step = {"step": 4, "seconds": 8.0, "seconds/rollouts": 6.0, "seconds/update": 2.0}
    with (folders[0] / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(step) + "\nnot JSON\n")
    second = {"role": "rollout", "engine": 3, "step": 4, "at": 9.5, "seconds": 0.5, "tokens": 21}
    (folders[0] / "engines.jsonl").write_text(json.dumps({**second, "cache": 0.25, "preemptions": 0}) + "\n")
    (folders[0] / "events.jsonl").write_text('{"step": 4, "text": "step 4 is <skipped>"}\n')
    file = tmp_path / "report.html"
    file.write_text(run_page(folders))
    with open_page(chromium, file) as page:
        assert page.locator("canvas").count() == 3, "evaluation, rewards and engines; the others are folded"
        assert page.locator("canvas").nth(1).get_attribute("aria-label") == "rewards/mean, a curve over the steps"
        page.locator("summary", has_text="step").press("Enter")
        # A browser tells the page only later that a part was unfolded.
        page.locator("[id=curves-step] canvas").first.wait_for()
        measured = page.locator('[data-node="rollouts"] .measured')
        assert "width: 75%" in (measured.get_attribute("style") or "")
        engine = page.locator("#engines").inner_text()
        assert "rollout 3" in engine
        assert "42" in engine, "tokens per second"
        assert page.locator("#differing-runs th").all_inner_texts() == ["value", *map(str, folders)]
        left_out = f"{folders[0]}/metrics.jsonl: line 6 is damaged or incomplete, and left out."
        assert page.locator("#left-out").inner_text() == left_out
        assert "step 4 is <skipped>" in page.locator("#events").inner_text()
        assert "+50%" in page.locator("#measured").inner_text()
        responses = page.locator(".sample .text:last-child")
        assert responses.all_inner_texts() == ["<b>best</b> 3", "<b>random</b> 3"]
        turns = page.locator(".timeline span")
        assert turns.count() == 2, "only the best sample has several"
        assert turns.nth(1).get_attribute("title") == "turn 2, segment 2: 5 tokens in 1 s after 4 s, reward 1"
        assert "left: 87.5%" in (turns.nth(1).get_attribute("style") or ""), "after 7 of 8 seconds"
        page.get_by_role("slider", name="Step").press("Home")
        assert responses.all_inner_texts() == ["<b>best</b> 1", "<b>random</b> 1"]
        assert_prints(page)
    assert_accessible(chromium, file)
