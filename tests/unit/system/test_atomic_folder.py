"""Folders that are complete or do not exist."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import EngineError
from rlflow.system.atomic_folder import remove_unfinished, write_folder


def test_the_first_of_two_that_write_the_same_stays(tmp_path: Path) -> None:
    def write(folder: Path, text: str) -> None:
        (folder / "a").write_text(text)

    def write_late(folder: Path) -> None:
        write_folder(tmp_path / "model", lambda other: write(other, "first"))
        write(folder, "second")

    write_folder(tmp_path / "model", write_late)
    assert (tmp_path / "model" / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_process_that_ends_deletes_nothing_that_a_thread_completes(tmp_path: Path) -> None:
    """Python's own temporary folders are deleted at exit, while daemons still run: half a checkpoint would be named."""
    program = (
        "import pathlib, sys, threading\n"
        "from rlflow.system.atomic_folder import unfinished\n"
        "def write():\n"
        "    with unfinished(pathlib.Path(sys.argv[1])) as temporary:\n"
        "        (temporary / 'weights').touch()\n"
        "        is_written.set()\n"
        "        threading.Event().wait()\n"
        "is_written = threading.Event()\n"
        "threading.Thread(target=write, daemon=True).start()\n"
        "is_written.wait()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "step-000002")], check=True, timeout=60)
    assert [each.name for each in tmp_path.rglob("weights")] == ["weights"]
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_deleted_yet_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may still write there when one has died."""

    def fail(folder: Path) -> None:
        raise EngineError("role actor: worker 0 died")

    def remove(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", remove)
        with pytest.raises(EngineError, match="worker 0 died"):
            write_folder(tmp_path / "step-000002", fail)
        remove_unfinished(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_get_the_mode_of_the_user(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "weights").touch(0o600)  # as safetensors does

    before = os.umask(0o027)
    try:
        write_folder(tmp_path / "model", write)
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "model", tmp_path / "model" / "weights")]
    assert modes == [0o750, 0o640]


def test_a_model_replaces_the_one_before_and_a_cached_one_stays(tmp_path: Path) -> None:
    def written(text: str, *, replaces: bool) -> str:
        def write(folder: Path) -> None:
            (folder / "b").write_text(text)

        write_folder(tmp_path / "a", write, replaces=replaces)
        return (tmp_path / "a" / "b").read_text()

    assert written("old", replaces=False) == "old"
    assert written("older", replaces=False) == "old"
    assert written("new", replaces=True) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
