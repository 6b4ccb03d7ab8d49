import errno
import json
import os
import shutil
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.engines.journal import journal_folder
from rlflow.errors import EngineError, RecipeError, StorageError
from rlflow.runtime import checkpoint
from rlflow.runtime.checkpoint import CheckpointWriter, RunProgress
from rlflow.system import atomic_folder
from tests.helpers import save_checkpoint

EXPERIMENT = {"name": "f", "roles": {}, "graph": {}}


class Engine:
    """Saves a number in two files."""

    def __init__(self, number: int = 0, *, fails: bool = False) -> None:
        self.number, self.fails = number, fails

    def save(self, folder: Path) -> None:
        (folder / "a").write_text(str(self.number))
        if self.fails:
            raise OSError("disk full")
        (folder / "b").write_text(str(self.number))

    def restore(self, folder: Path) -> None:
        self.number = int((folder / "b").read_text())


def save(run: Path, step: int, engine: Engine, keep: int = 2) -> None:
    save_checkpoint(run, RunProgress(EXPERIMENT, step, 4 * step, {"0": 0.5}), {"actor": engine}, keep)


def test_the_last_one_is_read_and_old_ones_go(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save(tmp_path, step, Engine(step))
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000010", "step-000011"]
    last, engine = checkpoint.last(tmp_path, EXPERIMENT), Engine()
    assert last is not None
    checkpoint.restore(last, {"actor": engine})
    assert (engine.number, last.progress) == (11, RunProgress(EXPERIMENT, 11, 44, {"0": 0.5}))


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    save(tmp_path, 1, Engine(1))
    with pytest.raises(StorageError, match="step-000002: disk full"):
        save(tmp_path, 2, Engine(2, fails=True))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert (last := checkpoint.last(tmp_path, EXPERIMENT)) is not None
    assert last.progress.step == 1


def _cut(folder: Path) -> None:
    (folder / "actor" / "b").write_text("")


def _remove(folder: Path) -> None:
    (folder / "actor" / "a").unlink()


def _manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def _edited(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | {"evaluations": {"0": 0.9}}))


def _of_another_step(folder: Path) -> None:
    shutil.copy(folder.with_name("step-000001") / "manifest.json", folder)


DAMAGES = [
    (_cut, "actor/b has changed since it was written"),
    (_remove, "actor/a is missing"),
    (_manifest, "manifest.json: Expecting property name"),
    (_edited, "manifest.json has changed since it was written"),
    (_of_another_step, "manifest.json is of step 1"),
]


@pytest.mark.parametrize(("damage", "fact"), DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, damage: Any, fact: str) -> None:
    for step in (1, 2):
        save(tmp_path, step, Engine(step))
    damage(tmp_path / "checkpoints" / "step-000002")
    last = checkpoint.last(tmp_path, EXPERIMENT)
    assert last is not None
    assert last.progress.step == 1
    (warning,) = last.damaged
    assert f"step-000002 is damaged ({fact}" in warning
    assert "the run resumes from step-000001, and damaged-step-000002 can be deleted" in warning
    # The resumed run saves its own checkpoint in the same place.
    save(tmp_path, 2, Engine(22))
    last, engine = checkpoint.last(tmp_path, EXPERIMENT), Engine()
    assert last is not None
    checkpoint.restore(last, {"actor": engine})
    assert (engine.number, last.damaged) == (22, ())


def test_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, Engine(step))
        _cut(tmp_path / "checkpoints" / f"step-00000{step}")
    with pytest.raises(
        RecipeError, match=r"every checkpoint of .* is damaged \(step-000002: actor/b .*; step-000001: "
    ):
        checkpoint.last(tmp_path, EXPERIMENT)
    assert len(checkpoint.checkpoints(tmp_path)) == 2, "nothing is moved"


def test_a_kill_while_an_old_one_is_deleted_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete_a_file(folder: Path, ignore_errors: bool = False) -> None:
        if ignore_errors:  # the folder that a checkpoint was written in
            return folder.rmdir()
        (folder / "actor" / "a").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_folder, "shutil", SimpleNamespace(rmtree=delete_a_file))
    for step in (1, 2):
        save(tmp_path, step, Engine(step))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 3, Engine(3))
    monkeypatch.undo()
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {".step-000001-removed", "step-000002", "step-000003"}
    checkpoint.remove_unfinished(tmp_path)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000002", "step-000003"]


def test_other_names_beside_checkpoints_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, 3, Engine(3))
    for name in ("step-best", "step-000009.bak", "step-9", "damaged-step-000008"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step-000007").touch()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000003"]
    assert (last := checkpoint.last(tmp_path, EXPERIMENT)) is not None
    assert last.progress.step == 3


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, Engine(1))
    for unfinished in (
        "checkpoints/.step-000002-abc_defg/step-000002",
        "checkpoints/.step-000003-removed/actor",
        "skipped/.step-000001-abcdefg1",
        "model/.actor-abcdefgh/before",
        "model/actor",
    ):
        (tmp_path / unfinished).mkdir(parents=True)
    checkpoint.remove_unfinished(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["actor"]
    assert not list((tmp_path / "skipped").iterdir())


def test_another_recipes_run(tmp_path: Path) -> None:
    save(tmp_path, 1, Engine(1))
    with pytest.raises(RecipeError, match='was trained with name "f", this recipe has "g"'):
        checkpoint.last(tmp_path, {**EXPERIMENT, "name": "g"})


def test_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.last(tmp_path, EXPERIMENT) is None


def test_a_run_that_resumes_at_its_end_removes_old_ones(tmp_path: Path) -> None:
    """The run was killed between its last checkpoint and the removal."""
    for step in (1, 2, 3):
        save(tmp_path, step, Engine(step), keep=9)
    CheckpointWriter(tmp_path, {}, 2, 3).save(progress(3))
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000002", "step-000003"]


class Disk:
    """A disk that takes its time until ``ready`` is set, and is full if ``full`` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, full: bool = False) -> None:
        self.ready, self.full, self._flush = Event(), full, os.fsync
        monkeypatch.setattr(os, "fsync", self.flush)

    def flush(self, handle: int) -> None:
        assert self.ready.wait(10)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._flush(handle)


def progress(step: int) -> RunProgress:
    return RunProgress(EXPERIMENT, step, 4 * step, {})


def test_a_run_goes_on_while_the_disk_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, engine = Disk(monkeypatch), Engine(1)
    with CheckpointWriter(tmp_path, {"actor": engine}, 2, None) as writer:
        writer.save(progress(1))
        engine.number = 2
        writer.check()
        assert checkpoint.checkpoints(tmp_path) == []
        disk.ready.set()
        writer.save(progress(2))
    found = checkpoint.checkpoints(tmp_path)
    assert [path.name for path in found] == ["step-000001", "step-000002"]
    assert [(path / "actor" / "b").read_text() for path in found] == ["1", "2"]


def test_records_of_steps_before_the_oldest_checkpoint_are_deleted(tmp_path: Path) -> None:
    for step in range(1, 5):
        (journal_folder(tmp_path) / f"step-{step:06d}").mkdir(parents=True)
    for step in range(1, 4):
        save(tmp_path, step, Engine(step), keep=2)
    assert [folder.name for folder in checkpoint.checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    left = sorted(folder.name for folder in journal_folder(tmp_path).iterdir())
    assert left == ["step-000002", "step-000003", "step-000004"]


def test_a_disk_that_is_full_meanwhile_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, Engine(1))
    disk = Disk(monkeypatch, full=True)
    writer = CheckpointWriter(tmp_path, {"actor": Engine(2)}, 2, 1)
    writer.save(progress(2))
    disk.ready.set()
    for call in (writer.wait, writer.check, lambda: writer.save(progress(3))):
        with pytest.raises(StorageError, match="step-000002: No space left on device"):
            call()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def fail_while_saving(writer: CheckpointWriter, error: BaseException) -> None:
    with writer:
        writer.save(progress(1))
        raise error


def test_an_error_of_the_run_comes_before_one_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, full=True)
    disk.ready.set()
    with pytest.raises(EngineError, match="a worker died"):
        fail_while_saving(CheckpointWriter(tmp_path, {}, 2, None), EngineError("a worker died"))
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_second_interrupt_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    writer = CheckpointWriter(tmp_path, {}, 2, None)
    with pytest.raises(KeyboardInterrupt):
        fail_while_saving(writer, KeyboardInterrupt())
    assert checkpoint.checkpoints(tmp_path) == []
    disk.ready.set()
    writer.wait()
