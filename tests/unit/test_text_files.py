"""Files that are replaced as one."""

import os
from pathlib import Path

import pytest

from rlflow.errors import StorageError
from rlflow.text_files import replace_text


def test_the_new_text_stands_there(tmp_path: Path) -> None:
    for text in ("old", "new"):
        replace_text(tmp_path / "plan.json", text)
        assert (tmp_path / "plan.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_full_disk_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    replace_text(tmp_path / "plan.json", "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=r"plan\.json: No space left on device\.\n  Fix: free some space"):
        replace_text(tmp_path / "plan.json", "new")
    assert (tmp_path / "plan.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
