"""Plans and runs as a notebook shows them."""

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import IPython.display
import pytest
import rich.console
from rich.console import Console
from rich.text import Text

import rlflow
from rlflow.report.plan_text import render
from rlflow.report.show import report_html
from rlflow.runtime.protocols import Report
from tests.helpers import load

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(1)> & "quoted" \u2028 $x^2$'


class Shown(HTMLParser):
    """The elements, the texts and the images of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.images: list[Mapping[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "img":
            self.images.append({name: value or "" for name, value in attrs})

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def report(folder: Path, **values: Any) -> Report:
    finished = Report(
        name="mine",
        fingerprint="0",
        status="finished",
        directory=str(folder),
        steps=3,
        seconds=3.5,
        eval_before=0.25,
        eval_after=0.75,
        step={"predicted": 2.0, "measured": 3.0},
        nodes={"update": {"predicted": 1.0, "measured": None}},
        store={},
        warnings=[],
        models={},
    )
    return replace(finished, **values)


def write_run(folder: Path, steps: int, **sample: Any) -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "evaluation/reward": 0.25}]
    lines += [{"step": step, "rewards/mean": step / 10, "seconds": 7.0} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"choice": "best", "prompt": "1+1=", "response": f"answer {step}", "reward": 1.0} for step in range(steps)]
    written = [json.dumps({"step": step + 1, **row, **sample}, ensure_ascii=False) for step, row in enumerate(rows)]
    (folder / "samples.jsonl").write_text("".join(line + "\n" for line in written), "utf-8")


def points(image: Mapping[str, str]) -> list[tuple[float, float]]:
    """Return the points of the curve in an image."""
    svg = ElementTree.fromstring(base64.b64decode(image["src"].removeprefix("data:image/svg+xml;base64,")))
    (line,) = svg.iter("{http://www.w3.org/2000/svg}polyline")
    pairs = [pair.split(",") for pair in line.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in pairs]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make this process a notebook, and return the list to which it adds what it displays."""
    displayed: list[Any] = []
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(IPython.display, "display", displayed.append)
    return displayed


def test_a_notebook_shows_a_plan_as_the_command_line_does(notebook: list[Any]) -> None:
    plan = rlflow.compile(load("recipe=grpo_32b"), "2x8")
    rlflow.show(plan)
    (shown,) = notebook
    console = Console(width=100, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(render(plan, width=console.width))
    lines = "".join(Shown(shown._repr_mimebundle_((), ())["text/html"]).texts).strip().splitlines()
    assert "rollout    0 ====" in captured.get()
    assert [line.rstrip() for line in lines] == [line.rstrip() for line in captured.get().splitlines()]


def test_a_notebook_shows_a_report_as_a_page(notebook: list[Any], tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    rlflow.show(report(tmp_path))
    (shown,) = notebook
    assert shown.data == report_html(report(tmp_path))


def test_a_terminal_shows_how_a_run_ended_and_its_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rlflow.show(report(tmp_path, directory="outputs/mine"))
    summary, _, headings, _, *times = capsys.readouterr().out.splitlines()
    assert summary == "mine finished: 3 steps in 4 s, in outputs/mine; held-out 0.250 before, 0.750 after"
    assert headings.split() == ["in", "a", "step", "predicted", "measured"]
    assert [line.split() for line in times] == [["the", "whole", "step", "2", "s", "3", "s"], ["update", "1", "s"]]


def test_a_report_shows_figures_curves_and_the_first_and_last_samples(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    shown = Shown(report_html(report(tmp_path)))
    texts = " ".join(shown.texts)
    assert f"finished: 3 steps in 4 s, in {tmp_path}; held-out 0.250 before, 0.750 after" in texts
    assert "the whole step 2 s 3 s update 1 s" in texts
    assert "1 best 1 1+1= answer 0" in texts
    assert "3 best 1 1+1= answer 2" in texts
    assert "answer 1" not in texts
    evaluation, rewards = shown.images
    assert evaluation["alt"] == "evaluation/reward: 0.25 in step 0, 0.25 in step 0"
    assert rewards["alt"] == "rewards/mean: 0.1 in step 1, 0.3 in step 3"
    # A curve is 200 wide and 80 high, from its lowest value to its highest one.
    assert points(rewards) == [(0, 80), (100, 40), (200, 0), (200, 0)]


def test_texts_of_a_model_are_texts(tmp_path: Path) -> None:
    write_run(tmp_path, 2, prompt=HOSTILE, response=HOSTILE, choice=HOSTILE)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, f"{HOSTILE}/mean": 1.0}) + "\n")
    shown = Shown(report_html(report(tmp_path, name=HOSTILE)))
    assert shown.tags == {"div", "p", "b", "img", "table", "thead", "tbody", "tr", "th", "td"}
    assert shown.attributes == {"class", "style", "alt", "title", "src"}
    assert len(shown.images) == 1
    assert points(shown.images[0]) == [(0, 80), (0, 80)]
    assert shown.texts.count(HOSTILE) == 7  # the name, and three texts of each sample
    assert [sample["response"] for sample in report(tmp_path).samples()] == [HOSTILE] * 2


@pytest.mark.slow
def test_a_long_run_has_small_curves_that_end_at_its_end(tmp_path: Path) -> None:
    write_run(tmp_path, 5000, response="long " * 1000)
    html = report_html(report(tmp_path))
    assert len(html) < 20_000
    _, rewards = Shown(html).images
    assert 100 < len(points(rewards)) <= 201
    assert points(rewards)[-1] == (200, 0)


def test_a_run_without_samples_and_evaluations_has_curves(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    (tmp_path / "samples.jsonl").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rewards/mean": NaN}\n')
    shown = Shown(report_html(report(tmp_path, eval_before=None, eval_after=None)))
    assert "held-out" not in " ".join(shown.texts)
    assert "response" not in shown.texts
    assert [image["alt"] for image in shown.images][1:] == ["rewards/mean: 0.1 in step 1, 0.2 in step 2"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_plan_is_shown_for_the_width_of_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    rlflow.show(rlflow.compile(load("recipe=grpo_32b"), "2x8"))
    text = Text.from_ansi(capsys.readouterr().out).plain
    assert max(map(len, text.splitlines())) <= min(width, 100)
    assert "fingerprint" in text
