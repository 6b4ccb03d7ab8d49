"""Checkpoints, which are complete or do not exist.

Each has a manifest with the digests of its files and of itself, and the step that is in the folder's name.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, Self

from rlflow.compiler.continuation import Experiment, check_continuation
from rlflow.compiler.plan import Plan
from rlflow.engines.journal import remove_records
from rlflow.errors import RecipeError
from rlflow.system import atomic_folder
from rlflow.system.atomic_folder import complete_folder, remove_folder, storage_errors, unfinished

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run: all that a resumed run needs besides engines and states."""

    experiment: Experiment
    """The experiment that the run trained when the checkpoint was written."""
    step: int
    """The number of steps made."""
    rows: int
    """The number of data rows that these steps have taken."""
    evaluations: Mapping[str, float]
    """The measures on held-out rows, by step; JSON's keys are texts."""
    skipped: Sequence[int] = ()
    """The steps, counted from 1, that were skipped because of values that were not finite."""
    data: str = ""
    """The number of training rows and their digest; empty in checkpoints of older versions."""

    def stepped(self, rows: int, skipped: Sequence[int]) -> "RunProgress":
        """Return the progress after one more step, which has taken ``rows`` rows; ``skipped`` are all skipped steps."""
        return replace(self, step=self.step + 1, rows=self.rows + rows, skipped=skipped)

    def evaluated(self, measure: float) -> "RunProgress":
        """Return the progress with a measure on held-out rows."""
        return replace(self, evaluations={**self.evaluations, str(self.step): measure})


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    progress: RunProgress
    damaged: tuple[str, ...] = ()
    """Warnings about newer checkpoints that were damaged and have been moved aside."""


class _DamageError(Exception):
    """A checkpoint has changed since it was written."""


def _begin(run: Path, progress: RunProgress, parts: Mapping[str, Any], keep: int) -> Callable[[], None]:
    """Let all ``parts`` write their files, and return the function that makes them a checkpoint."""
    folder = _folder(run, progress.step)
    with storage_errors(folder), ExitStack() as stack:
        temporary = stack.enter_context(unfinished(folder))
        for name, part in parts.items():
            (temporary / name).mkdir()
            # The part may be in a process with another working directory.
            part.save((temporary / name).absolute())
        written = stack.pop_all()

    def complete() -> None:
        with storage_errors(folder), written:
            files = {str(p.relative_to(temporary)): _digest(p) for p in sorted(temporary.rglob("*")) if p.is_file()}
            content = {**asdict(progress), "files": files}
            (temporary / _MANIFEST).write_text(json.dumps(content | {"digest": _digest_of(content)}, indent=1))
            complete_folder(temporary, folder)
            _remove_old(run, keep)

    return complete


def _remove_old(run: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and the records of steps that no resumed run makes again."""
    newest_last = checkpoints(run)
    for old in newest_last[:-keep]:
        remove_folder(old)
    remove_records(run, before=checkpoint_step(newest_last[-keep:][0]))


class CheckpointWriter:
    """Writes the checkpoints of a run, each step at most once.

    The parts write their files while the run waits. A thread then reads, flushes and names them during the next step:
    files cost no more time than a copy in memory, and no memory. An error of the thread is raised by the next call.
    """

    def __init__(self, run: Path, parts: Mapping[str, Any], keep: int, saved_step: int | None) -> None:
        """Write ``parts`` to ``run``. ``saved_step`` is the step of the checkpoint that the run resumes from."""
        self._run, self._parts, self._keep, self._saved_step = run, parts, keep, saved_step
        self._completing: Future[None] = Future()
        self._completing.set_result(None)

    def save(self, progress: RunProgress) -> None:
        """Write a checkpoint of the progress so far, unless there is one."""
        self.wait()
        if progress.step == self._saved_step:
            # The run that wrote it may have been killed before it removed old ones.
            _remove_old(self._run, self._keep)
        else:
            complete = _begin(self._run, progress, self._parts, self._keep)
            self._completing = Future()
            # A daemon, because a second Ctrl-C ends the process at once.
            Thread(target=_fulfil, args=(self._completing, complete), name="checkpoint", daemon=True).start()
            self._saved_step = progress.step

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be completed."""
        if self._completing.done():
            self._completing.result()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete, and raise its error."""
        self._completing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last checkpoint, unless the process is to end at once. An error of the run comes first."""
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            self._completing.exception()


def _fulfil(future: "Future[None]", call: Callable[[], None]) -> None:
    try:
        call()
        future.set_result(None)
    except BaseException as error:  # raised in the thread of the run
        future.set_exception(error)


def is_checkpoint_due(plan: Plan, progress: RunProgress) -> bool:
    """Return whether the recipe asks for a checkpoint after the steps so far."""
    return progress.step > 0 and progress.step % plan.recipe.checkpoints.every == 0


def is_finished(plan: Plan, progress: RunProgress) -> bool:
    """Return whether all steps are made, or the last evaluations bring no new best and ``patience`` is over."""
    patience = plan.recipe.evaluation.patience if plan.recipe.evaluation else None
    measures = list(progress.evaluations.values())
    has_new_best = (
        patience is None or len(measures) <= patience or max(measures[-patience:]) > max(measures[:-patience])
    )
    return progress.step == plan.recipe.steps or not has_new_best


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of the checkpoints, the oldest first. Files and folders with other names are ignored."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted(
        (folder for folder in folders if _NAME.fullmatch(folder.name) and folder.is_dir()), key=checkpoint_step
    )


def last(run: Path, experiment: Experiment) -> Checkpoint | None:
    """Return the newest checkpoint that is undamaged; None where there are no checkpoints.

    Newer ones that are damaged are renamed, so that the run can write there. Raises RecipeError for a run that cannot
    continue as ``experiment``, and where every checkpoint is damaged.
    """
    damaged: dict[Path, str] = {}
    for folder in reversed(checkpoints(run)):
        try:
            progress = _read(folder, run, experiment)
        except _DamageError as damage:
            damaged[folder] = str(damage)
        else:
            warnings = [
                f"the checkpoint {newer} is damaged ({fact}): the run resumes from {folder.name}, and "
                f"{_set_aside(newer).name} can be deleted"
                for newer, fact in damaged.items()
            ]
            return Checkpoint(folder, progress, tuple(warnings))
    if damaged:
        facts = "; ".join(f"{folder.name}: {fact}" for folder, fact in damaged.items())
        fix = "restore its files from a copy, or start a new run without resume in another folder"
        raise RecipeError("resume", f"every checkpoint of '{run}' is damaged ({facts})", fix=fix)
    return None


def nearest(run: Path, step: int, experiment: Experiment) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of at most so many steps; without one the oldest of more steps, or None.

    Raises RecipeError for a run that cannot continue as ``experiment``.
    """
    distances = {folder: checkpoint_step(folder) - step for folder in checkpoints(run)}
    for folder in sorted(distances, key=lambda folder: (distances[folder] > 0, abs(distances[folder]))):
        with suppress(_DamageError):
            return Checkpoint(folder, _read(folder, run, experiment))
    return None


def remove_unfinished(run: Path) -> None:
    """Delete unfinished and half-deleted folders of a killed run. Needs the folder's lock."""
    for parent in (run / "checkpoints", run / "model", run / "skipped"):
        atomic_folder.remove_unfinished(parent)


def _read(folder: Path, run: Path, experiment: Experiment) -> RunProgress:
    """Check a checkpoint against its manifest. Raises _DamageError, or RecipeError for a run of another recipe."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        digest = manifest.pop("digest")
        intact = digest == _digest_of(manifest)
        files = manifest.pop("files")
        progress = RunProgress(**manifest | {"skipped": tuple(manifest.get("skipped", ()))})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamageError(f"{_MANIFEST}: {error}") from None
    if not intact:
        raise _DamageError(f"{_MANIFEST} has changed since it was written")
    if progress.step != checkpoint_step(folder):
        raise _DamageError(f"{_MANIFEST} is of step {progress.step}")
    check_continuation(progress.experiment, experiment, run)
    for name, digest in files.items():
        if not (folder / name).is_file():
            raise _DamageError(f"{name} is missing")
        if _digest(folder / name) != digest:
            raise _DamageError(f"{name} has changed since it was written")
    # Learning rate or batch size may have changed; the next checkpoint belongs to the experiment that continues.
    return replace(progress, experiment=experiment)


def _folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def checkpoint_step(folder: Path) -> int:
    """Return the step of the checkpoint in ``folder``."""
    return int(folder.name.removeprefix("step-"))


def _set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it no longer counts as one, and return its new path."""
    aside = folder.with_name(f"damaged-{folder.name}")
    if aside.exists():
        shutil.rmtree(aside)
    return folder.rename(aside)


def restore(checkpoint: Checkpoint, parts: Mapping[str, Any]) -> None:
    """Restore all parts that ``save`` has written."""
    for name, part in parts.items():
        part.restore((checkpoint.folder / name).absolute())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's content as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
