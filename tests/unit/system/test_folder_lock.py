import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.errors import RecipeError
from rlflow.system.folder_lock import LOCK_FILE, locked

HOLDER = """
import sys, time
from pathlib import Path
from rlflow.system.folder_lock import locked
with locked(Path(sys.argv[1])):
    (Path(sys.argv[1]) / "plan.json").touch()
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    """A killed run leaves its lock file, which locks nothing."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RecipeError, match=f"is in use by another run, process {holder.pid} on "), locked(folder):
            pass
        assert sorted(os.listdir(folder)) == [LOCK_FILE, "plan.json"]
        holder.kill()
    assert (folder / LOCK_FILE).exists()
    with locked(folder):
        pass


def test_a_process_forked_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    read, write = os.pipe()
    with locked(tmp_path):
        (tmp_path / "plan.json").touch()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        with pytest.raises(RecipeError, match=f"process {os.getpid()} on "), locked(tmp_path):
            pass
    try:
        with locked(tmp_path):
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)


def test_a_run_that_writes_nothing_leaves_nothing(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine.txt").touch()
    with locked(tmp_path):
        pass
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_a_lock_file_that_was_removed_while_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a file that no other run can find would lock nobody out."""
    opened = os.open
    calls = 0

    def open_and_remove(path: Path, *arguments: int) -> int:
        nonlocal calls
        calls += 1
        handle = opened(path, *arguments)
        if calls == 1:
            os.unlink(path)
        return handle

    monkeypatch.setattr(os, "open", open_and_remove)
    with locked(tmp_path):
        assert calls == 2
        assert (tmp_path / LOCK_FILE).exists()
