"""Folders that are complete or do not exist."""

import os
from pathlib import Path

from rlflow.runtime.atomic_folder import write_folder


def test_the_first_of_two_that_write_the_same_stays(tmp_path: Path) -> None:
    def write(folder: Path, text: str) -> None:
        (folder / "a").write_text(text)

    def write_late(folder: Path) -> None:
        write_folder(tmp_path / "model", lambda other: write(other, "first"))
        write(folder, "second")

    write_folder(tmp_path / "model", write_late)
    assert (tmp_path / "model" / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


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
