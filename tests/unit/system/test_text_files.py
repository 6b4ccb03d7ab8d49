"""Files that are replaced as one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import rlflow
from rlflow.compiler.plan import write_plan
from rlflow.errors import StorageError
from rlflow.system.text_files import replace_text
from tests.conftest import CONFIG_DIR
from tests.helpers import load


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that fills the disk."""

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", fail)


def test_the_new_text_stands_there(tmp_path: Path) -> None:
    for text in ("old", "new"):
        replace_text(tmp_path / "plan.json", text)
        assert (tmp_path / "plan.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_plan(tmp_path: Path, full_disk: Callable[[], None]) -> None:
    plans = [rlflow.compile(load("recipe=fake", f"seed={seed}", config_dir=CONFIG_DIR)) for seed in (1, 2)]
    write_plan(plans[0], tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert before.keys() >= {"plan.json", "recipe.yaml"}
    full_disk()
    with pytest.raises(StorageError):
        write_plan(plans[1], tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_full_disk_leaves_the_old_text(tmp_path: Path, full_disk: Callable[[], None]) -> None:
    replace_text(tmp_path / "plan.json", "old")
    full_disk()
    with pytest.raises(StorageError, match=r"plan\.json: No space left on device\.\n  Fix: free some space"):
        replace_text(tmp_path / "plan.json", "new")
    assert (tmp_path / "plan.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
