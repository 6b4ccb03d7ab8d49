"""Checkpoints: whole or not there at all.

A checkpoint is written to a folder of another name, flushed to disk with a manifest of its files, and renamed.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import RecipeError

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Progress:
    """What a run needs besides its engines to go on."""

    fingerprint: str
    step: int
    """Steps that are behind."""
    evaluations: Mapping[str, float]
    """By step, as JSON has its keys."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole one, on disk."""

    folder: Path
    progress: Progress


def write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Calls ``write`` with a new folder, and gives that the name ``folder`` when all of it is on disk.

    A folder that has come to stand there, from another process that does the same work, stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        temporary = Path(name) / folder.name
        temporary.mkdir()
        write(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            _flush(path)
        if not folder.exists():
            temporary.rename(folder)
            _flush(folder.parent)


def save(run: Path, progress: Progress, engines: Mapping[str, Any], keep: int) -> None:
    """``engines`` are those that train, by role. Older checkpoints than the last ``keep`` are removed."""

    def write(folder: Path) -> None:
        for role, engine in engines.items():
            (folder / role).mkdir()
            # It may be in a process that has another working directory.
            engine.save((folder / role).absolute())
        files = {str(p.relative_to(folder)): _digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        (folder / _MANIFEST).write_text(json.dumps({**asdict(progress), "files": files}, indent=1))

    write_whole(run / "checkpoints" / f"step-{progress.step:06d}", write)
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)


def checkpoints(run: Path) -> list[Path]:
    """The whole ones, the oldest first."""
    return sorted((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))


def last(run: Path, fingerprint: str) -> Checkpoint | None:
    """None when there is none. Raises RecipeError when it is damaged or another recipe's."""
    found = checkpoints(run)
    if not found:
        return None
    progress = _read(found[-1])
    if progress.fingerprint != fingerprint:
        raise RecipeError(
            "resume",
            f"'{run}' ran a recipe with the fingerprint {progress.fingerprint}, this one has {fingerprint}",
            fix=f"the same recipe and overrides, or plan={run}/plan.json",
        )
    return Checkpoint(found[-1], progress)


def _read(folder: Path) -> Progress:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        files = manifest.pop("files")
        progress = Progress(**manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{_MANIFEST}: {error}") from None
    for name, digest in files.items():
        if not (folder / name).is_file():
            raise _damaged(folder, f"{name} is missing")
        if _digest(folder / name) != digest:
            raise _damaged(folder, f"{name} is not as it was written")
    return progress


def restore(checkpoint: Checkpoint, engines: Mapping[str, Any]) -> None:
    """Puts the engines that train, by role, where they were."""
    for role, engine in engines.items():
        engine.restore((checkpoint.folder / role).absolute())


def _damaged(folder: Path, fact: str) -> RecipeError:
    fix = f"remove {folder} to go on from the one before it"
    return RecipeError("resume", f"the checkpoint {folder} is damaged ({fact})", fix=fix)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
