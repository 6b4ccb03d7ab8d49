"""Runs the notebook of the documentation, and stores what it shows: python -m tests.notebook

The run and the model that it starts from go to a folder that is deleted.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "first-run.ipynb"


def read() -> NotebookNode:
    """Return the notebook with the outputs that are stored."""
    return nbformat.read(NOTEBOOK, as_version=4)


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run all cells in this folder, in a process of their own, and replace their outputs."""
    # tqdm asks for ipywidgets, which only draw its bars.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore:IProgress not found"}
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
        timeout=2400,
    )
    client.execute(env=environment)


def main() -> None:
    notebook = read()
    metadata = notebook.metadata.copy()
    with TemporaryDirectory() as folder:
        os.environ["RLFLOW_CACHE"] = f"{folder}/cache"
        # The tests compute with one thread, a reader's notebook with as many as there are cores: it rounds differently.
        os.environ.pop("OMP_NUM_THREADS", None)
        execute(notebook, Path(folder))
    notebook.metadata = metadata  # without the version of this machine's Python
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
