"""docs/first-run.ipynb runs, and shows what is stored in it."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from tests.integration.test_cluster_run import NEW_MODEL
from tests.notebook import NOTEBOOK, execute, read

PLANNED = ("plan", "size", "large", "compare", "error")
"""The cells whose outputs are the same on every machine."""


def outputs(notebook: NotebookNode) -> dict[str, list[Any]]:
    """Return the outputs of all cells with code, by the name of the cell."""
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def curves(html: str) -> dict[str, list[float]]:
    """Return the first and the last value of each curve that a report shows."""
    found = re.findall(r'<img alt="(\S+): (\S+) in step \d+, (\S+) in step \d+"', html)
    return {name: [float(first), float(last)] for name, first, last in found}


def test_the_stored_outputs_are_small_and_safe() -> None:
    assert NOTEBOOK.stat().st_size < 300_000
    stored = outputs(read())
    assert all(stored[cell] for cell in stored)
    assert all(output.get("name") != "stderr" for cell in stored for output in stored[cell])
    assert "<script" not in NOTEBOOK.read_text()


@pytest.mark.slow
def test_the_notebook_runs_with_a_small_model(tmp_path: Path) -> None:
    """The model has random weights, so that no other run must make it."""
    notebook, stored = read(), outputs(read())
    small = ["recipe=grpo_tiny", "steps=2", "roles.actor.optimizer.warmup_steps=2", *NEW_MODEL]
    cells = [cell.id for cell in notebook.cells]
    plan = nbformat.v4.new_code_cell(f"plan = rlflow.compile(rlflow.load({small}), 'local')")
    notebook.cells.insert(cells.index("run"), plan)
    execute(notebook, tmp_path)
    shown = outputs(notebook)
    for cell in PLANNED:
        assert [output.get("data", output) for output in shown[cell]] == [
            output.get("data", output) for output in stored[cell]
        ]
    (told,) = shown["run"]
    assert told["name"] == "stdout"
    assert "grpo_tiny finished" in told["text"]
    (report,) = shown["report"]
    assert curves(report.data["text/html"]).keys() == curves(stored["report"][0].data["text/html"]).keys()
    assert len(shown["rows"][0]["text"].splitlines()) == 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_notebook_trains_the_model_that_it_shows(tmp_path: Path) -> None:
    notebook = read()
    execute(notebook, tmp_path)
    for each in (read(), notebook):
        (report,) = outputs(each)["report"]
        before, after = curves(report.data["text/html"])["evaluation/reward"]
        assert before < 0.6
        assert after > 0.9
