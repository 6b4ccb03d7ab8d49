"""Checkpoints: whole or not there at all.

A checkpoint is written to a folder of another name, flushed to disk with a manifest of its files, and renamed. The
manifest has the digests of the files and of itself, and the step that is in the folder's name.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlflow.compiler.continuation import Experiment, check_continuation
from rlflow.errors import EngineError, RecipeError, StorageError, first_line

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Progress:
    """What a run needs besides its engines to go on."""

    experiment: Experiment
    """The experiment that the run trained when the checkpoint was written."""
    step: int
    """Steps that are behind."""
    rows: int
    """Rows of the data that these steps have taken."""
    evaluations: Mapping[str, float]
    """By step, as JSON has its keys."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole one, on disk."""

    folder: Path
    progress: Progress
    damaged: tuple[str, ...] = ()
    """Warnings about newer checkpoints that were damaged and have been moved aside."""


class _DamageError(Exception):
    """A checkpoint is not as it was written."""


def write_whole(folder: Path, write: Callable[[Path], object], *, replaces: bool = False) -> None:
    """Call ``write`` with a new folder, and give that the name ``folder`` when all of it is on disk.

    A folder that stands there by then, from another process that does the same work, stays unless this ``replaces`` it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        temporary = Path(name) / folder.name
        temporary.mkdir()
        with _storage_errors(folder):
            write(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            if path.is_file():  # safetensors makes files that only their owner may read
                path.chmod(temporary.stat().st_mode & 0o666)
            _flush(path)
        if replaces and folder.exists():
            folder.rename(Path(name) / "before")
        if not folder.exists():
            temporary.rename(folder)
            _flush(folder.parent)


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    """Raise StorageError for the errors that torch and safetensors have of their own for a full disk."""
    # A dry run looks for checkpoints, and needs no library that trains.
    from safetensors import SafetensorError

    try:
        yield
    except EngineError:
        raise
    except (RuntimeError, SafetensorError) as error:
        raise StorageError(
            f"{folder}: cannot be written ({first_line(error)}).\n  Fix: free some space on that disk."
        ) from error


def save(run: Path, progress: Progress, engines: Mapping[str, Any], keep: int) -> None:
    """Write a checkpoint of ``engines``, the trained ones by role, and remove all but the newest ``keep``."""

    def write(folder: Path) -> None:
        for role, engine in engines.items():
            (folder / role).mkdir()
            # It may be in a process that has another working directory.
            engine.save((folder / role).absolute())
        files = {str(p.relative_to(folder)): _digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        content = {**asdict(progress), "files": files}
        (folder / _MANIFEST).write_text(json.dumps(content | {"digest": _digest_of(content)}, indent=1))

    write_whole(_folder(run, progress.step), write)
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of the checkpoints, the oldest first. Files and folders with other names are ignored."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted((each for each in folders if _NAME.fullmatch(each.name) and each.is_dir()), key=checkpoint_step)


def last(run: Path, experiment: Experiment) -> Checkpoint | None:
    """Return the newest checkpoint that is as it was written; None where there is none at all.

    Newer ones that are damaged are moved aside, so that they do not stand where the run will write. Raises RecipeError
    for a run that cannot go on as ``experiment``, and where every checkpoint is damaged.
    """
    damaged: dict[Path, str] = {}
    for folder in reversed(checkpoints(run)):
        try:
            progress = _read(folder, run, experiment)
        except _DamageError as damage:
            damaged[folder] = str(damage)
        else:
            warnings = [
                f"the checkpoint {each} is damaged ({fact}): the run goes on from {folder.name}, and "
                f"{_set_aside(each).name} can be deleted"
                for each, fact in damaged.items()
            ]
            return Checkpoint(folder, progress, tuple(warnings))
    if damaged:
        facts = "; ".join(f"{folder.name}: {fact}" for folder, fact in damaged.items())
        fix = "restore its files from a copy, or start a new run without resume in another folder"
        raise RecipeError("resume", f"every checkpoint of '{run}' is damaged ({facts})", fix=fix)
    return None


def remove_unfinished(run: Path) -> None:
    """Delete what a run that was killed had begun to write of checkpoints and models. Needs the folder's lock."""
    for parent in (run / "checkpoints", run / "model"):
        for folder in parent.glob(".*-*"):
            shutil.rmtree(folder)


def _read(folder: Path, run: Path, experiment: Experiment) -> Progress:
    """Check a checkpoint against its manifest. Raises _DamageError, or RecipeError for a run of another recipe."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        digest = manifest.pop("digest")
        intact = digest == _digest_of(manifest)
        files = manifest.pop("files")
        progress = Progress(**manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamageError(f"{_MANIFEST}: {error}") from None
    if not intact:
        raise _DamageError(f"{_MANIFEST} is not as it was written")
    if progress.step != checkpoint_step(folder):
        raise _DamageError(f"{_MANIFEST} is of step {progress.step}")
    check_continuation(progress.experiment, experiment, run)
    for name, digest in files.items():
        if not (folder / name).is_file():
            raise _DamageError(f"{name} is missing")
        if _digest(folder / name) != digest:
            raise _DamageError(f"{name} is not as it was written")
    return progress


def _folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def checkpoint_step(folder: Path) -> int:
    """Return the step of the checkpoint in ``folder``."""
    return int(folder.name.removeprefix("step-"))


def _set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to a name that is not a checkpoint's, and return that."""
    aside = folder.with_name(f"damaged-{folder.name}")
    if aside.exists():
        shutil.rmtree(aside)
    return folder.rename(aside)


def restore(checkpoint: Checkpoint, engines: Mapping[str, Any]) -> None:
    """Puts the engines that train, by role, where they were."""
    for role, engine in engines.items():
        engine.restore((checkpoint.folder / role).absolute())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's content, as JSON has it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
