"""Runs as a page: curves, samples, and times and memory against the prediction, in one HTML file that loads nothing."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError
from rlflow.report.page import build_page
from rlflow.report.records import read_lines
from rlflow.runtime.protocols import Observer, Report
from rlflow.text_files import replace_text

PAGE = "report.html"
"""The name of the page in a run's folder."""
# The points of a curve and the steps with samples that a page holds at most, so that it stays small for long runs.
_POINTS, _SAMPLED_STEPS = 400, 40
# The characters of a prompt or a response on the page, at most.
_CHARACTERS = 4000


class PageWriter(Observer):
    """A writer of the page of a run at its end."""

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._directory = directory

    def ended(self, report: Report) -> None:
        replace_text(self._directory / PAGE, run_page([self._directory]))


def run_page(folders: Sequence[Path]) -> str:
    """Return a page about the runs in these folders. Raises RecipeError for a folder without a run.

    The curves are drawn by uPlot, which is part of the page.
    """
    runs = [run_figures(folder) for folder in folders]
    figures = {"runs": runs, "differences": differences([run.pop("recipe") for run in runs])}
    return build_page("run_page.html", figures)


def run_figures(folder: Path) -> dict[str, Any]:
    """Return what the page shows of one run, from the files that it has written so far. Raises RecipeError."""
    if not (folder / "plan.json").exists() or not (folder / "metrics.jsonl").exists():
        raise RecipeError("run", f"'{folder}' holds no run", fix="the folder that a run has printed, outputs/DATE/TIME")
    plan = json.loads((folder / "plan.json").read_text("utf-8"))
    report = folder / "report.json"
    samples = folder / "samples.jsonl"
    return {
        "folder": str(folder),
        "name": plan["recipe"]["name"],
        "recipe": plan["recipe"],
        "report": json.loads(report.read_text("utf-8")) if report.exists() else None,
        "steps": plan["recipe"]["steps"],
        "curves": _curves(read_lines(folder / "metrics.jsonl")),
        "samples": _samples(read_lines(samples)) if samples.exists() else [],
    }


def differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the values of every recipe at the paths where they differ; an empty text where a recipe has none."""
    flat = [dict(_leaves(recipe, "")) for recipe in recipes]
    paths = sorted({path for leaves in flat for path in leaves})
    values = {path: [leaves.get(path, "") for leaves in flat] for path in paths}
    return {path: row for path, row in values.items() if len(set(row)) > 1}


def _leaves(value: Any, path: str) -> Sequence[tuple[str, str]]:
    if not isinstance(value, Mapping) or not value:
        return [(path, json.dumps(value))]
    return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}" if path else key)]


def _curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Return the steps and the values of each metric, of long runs only some."""
    curves: dict[str, list[list[float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                steps, values = curves.setdefault(name, [[], []])
                steps.append(line["step"])
                values.append(value)
    return {name: [_some(column, _POINTS) for column in columns] for name, columns in curves.items()}


def _samples(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    steps = set(_some(sorted({line["step"] for line in lines}), _SAMPLED_STEPS))
    return [
        {**line, "prompt": _shorten(line["prompt"]), "response": _shorten(line["response"])}
        for line in lines
        if line["step"] in steps
    ]


def _some(values: list[Any], count: int) -> list[Any]:
    """Return at most ``count`` of the values, evenly spread, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def _shorten(text: str) -> str:
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
