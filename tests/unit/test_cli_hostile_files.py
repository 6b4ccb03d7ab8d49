"""Clusters and models of strangers are refused before anything starts, with the place of the mistake and a fix."""

import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from benchmarks.hostile_files import FILES
from benchmarks.hostile_recipes import write_files
from rlflow.cli import main

# One of a cluster and one of a model for `make check`.
QUICK = {"cluster: an escape code", "model: a list of lists"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FILES]
)
def test_a_short_error_with_a_fix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, words = FILES[name]
    parts = write_files(tmp_path, files)
    GlobalHydra.instance().clear()
    monkeypatch.chdir(tmp_path)
    arguments = [word.replace("PARTS", str(parts)) for word in words]
    monkeypatch.setattr(sys, "argv", ["rlflow", "--config-dir", str(parts), *arguments, "dry_run=true"])
    code, said = main(), capsys.readouterr().err
    assert code == 2, said
    assert said.startswith(f"RecipeError: {'models.policy.path' if name.startswith('model') else 'cluster.hosts'}"), (
        said
    )
    assert "  Fix: " in said
    assert said.replace("\n", "").isprintable()
    assert len(said) < 1500
