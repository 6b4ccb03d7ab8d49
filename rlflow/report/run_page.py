"""Runs as a page: curves, samples, events, and times and memory against the prediction, in one HTML file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.report.page import build_page
from rlflow.report.run_figures import RunFiles
from rlflow.runtime.protocols import Observer, Report
from rlflow.system.text_files import replace_text

PAGE = "report.html"
"""The name of the page in a run's folder."""
TEMPLATE = "run_page.html"
"""The template of the page, which is also that of a run that goes on."""


class PageWriter(Observer):
    """A writer of the page of a run at its end."""

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._directory = directory

    def ended(self, report: Report) -> None:
        replace_text(self._directory / PAGE, run_page([self._directory]))


def run_page(folders: Sequence[Path]) -> str:
    """Return a page about the runs in these folders, which loads nothing. Raises RecipeError for one without a run.

    The curves are drawn by uPlot, which is part of the page.
    """
    return build_page(TEMPLATE, page_figures([RunFiles(folder) for folder in folders]))


def page_figures(files: Sequence[RunFiles]) -> dict[str, Any]:
    """Return the figures of all runs on a page, from what they have written so far."""
    runs = [run.figures() for run in files]
    return {"runs": runs, "differences": differences([run.pop("recipe") for run in runs])}


def differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the values of every recipe at the paths where they differ; an empty text where a recipe has none."""
    flat = [dict(leaves(recipe, "")) for recipe in recipes]
    paths = sorted({path for values in flat for path in values})
    rows = {path: [values.get(path, "") for values in flat] for path in paths}
    return {path: row for path, row in rows.items() if len(set(row)) > 1}


def leaves(value: Any, path: str) -> Sequence[tuple[str, str]]:
    """Return the path and the JSON of every value at ``path`` and below it that has no values inside."""
    if not isinstance(value, Mapping) or not value:
        return [(path, json.dumps(value))]
    return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}" if path else key)]
