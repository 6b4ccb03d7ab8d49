"""The journal of a run: finished responses in its folder, so that a run that resumes does not generate them again.

A response follows from the role, the version of its weights, the sampling, the prompt and the sample's key, from which
its random numbers come. An engine that is asked for a response first looks whether the journal has one for the same
five, whichever engine recorded it.

Each engine appends to a file of its own, one for each step. A record that was cut off or damaged counts as missing.

Shapes: B samples; [B, 2] are their names: a digest of all but the sample's number in its group, and this number.
"""

import json
import shutil
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from io import BytesIO
from os import SEEK_CUR, fstat
from pathlib import Path
from secrets import token_hex
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Prompts, Rollouts
from rlflow.batch.files import read_rollouts, write_rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import is_done
from rlflow.system.text_files import replace_text

Ints = NDArray[np.int64]
Names = NDArray[np.uint64]

# A record has a header, the names of its responses, a checksum of both, and the rollouts. The header has the number of
# responses, and the bytes of the rollouts with their checksum.
_HEADER, _CHECKSUM = Struct("<QQI"), Struct("<I")
_NAME_BYTES, _DIGEST_BYTES = 16, 8
_EXPERIMENT = "experiment.json"


class Journal:
    """The finished responses of a role, in files that all engines of the role read."""

    def __init__(self, folder: Path | None, role: str) -> None:
        """Use the ``folder`` of the run's journal; without one, record nothing."""
        self.version = 0
        """The version of the weights that the engine has now."""
        self._folder, self._role = folder, role
        self._file_name = self._new_file_name()
        self._known: dict[int, _StepRecords] = {}
        self._lock = threading.Lock()
        """Guards ``_known``."""

    def add(self, rollouts: Rollouts, samples: Prompts, sampling: Sampling) -> None:
        """Record finished rollouts of these samples, row by row.

        A disk that cannot take them loses records, which costs time after a crash. It does not end the run.
        """
        if self._folder is None:
            return
        steps = self._steps(samples.keys)
        names = self._names(samples, sampling)
        for step in np.unique(steps).tolist():
            rows = np.flatnonzero(steps == step)
            part, part_samples = (
                (rollouts, samples) if len(rows) == len(steps) else (rollouts.take(rows), samples.take(rows))
            )
            try:
                self._append(_folder(self._folder, step), names[rows], part, part_samples)
            except OSError:
                # Nothing can follow a record that is cut off.
                self._file_name = self._new_file_name()

    def recorded(self, keys: Ints) -> "RecordedResponses":
        """Return what is recorded at this moment for the steps of samples with these keys, [B, 3].

        It reads only what was added since it was last asked about these steps.
        """
        places: dict[tuple[int, int], tuple[_Record, int]] = {}
        steps = np.unique(self._steps(keys)).tolist() if self._folder else []
        with self._lock:
            # Nobody asks about earlier steps again.
            self._known = {step: known for step, known in self._known.items() if steps and step >= steps[0]}
            for step in steps:
                assert self._folder is not None
                known = self._known.setdefault(step, _StepRecords())
                known.read_new(_folder(self._folder, step).glob(f"{self._role}-*"))
                places |= known.places
        return RecordedResponses(self, places)

    def _append(self, folder: Path, names: Names, rollouts: Rollouts, samples: Prompts) -> None:
        buffer = BytesIO()
        if rollouts.prompt_segments is None:  # the reader has the prompts already
            none = Packed(np.empty(0, np.int32), np.zeros(len(rollouts) + 1, np.int64))
            rollouts = replace(rollouts, prompt_ids=none)
        write_rollouts(buffer, rollouts, samples.rows)
        content = buffer.getvalue()
        head = _HEADER.pack(len(names), len(content), zlib.crc32(content)) + names.tobytes()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / self._file_name).open("ab") as file:
            file.write(head + _CHECKSUM.pack(zlib.crc32(head)) + content)

    def _new_file_name(self) -> str:
        """Return a name that no other process uses, even one that was given up and still runs."""
        return f"{self._role}-{token_hex(8)}"

    def _steps(self, keys: Ints) -> Ints:
        """Return for each sample the first step that can train on a response of this version."""
        return np.maximum(keys[:, 0], self.version)

    def _names(self, samples: Prompts, sampling: Sampling) -> Names:
        """Return the name of the response to each sample, [B, 2]. Samples of one prompt are neighbours."""
        common = blake2b(repr((self._role, self.version, sampling)).encode(), digest_size=_DIGEST_BYTES)
        prompts, ids = samples.keys[:, :2], samples.ids.values.astype(np.int32)
        is_first = np.append(True, (prompts[1:] != prompts[:-1]).any(1))[: len(prompts)]
        digests = []
        for row in np.flatnonzero(is_first).tolist():
            digest = common.copy()
            digest.update(prompts[row].tobytes())
            digest.update(ids[samples.ids.offsets[row] : samples.ids.offsets[row + 1]].tobytes())
            if samples.images is not None:  # equal ids do not mean equal images
                digest.update(samples.images[row].tobytes())
            digests.append(digest.digest())
        of_prompts = np.frombuffer(b"".join(digests), np.uint64)
        return np.stack([of_prompts[np.cumsum(is_first) - 1], samples.keys[:, 2].astype(np.uint64)], axis=1)


class RecordedResponses:
    """The recorded responses of some steps."""

    def __init__(self, journal: Journal, places: "Mapping[tuple[int, int], tuple[_Record, int]]") -> None:
        self._journal, self._places = journal, places

    def find(self, samples: Prompts, sampling: Sampling) -> tuple[Ints, Rollouts | None]:
        """Return which of the samples have recorded responses, ascending, and these; None where none has."""
        if not self._places:
            return np.zeros(0, np.int64), None
        wanted: dict[_Record, list[tuple[int, int]]] = defaultdict(list)
        for row, (digest, number) in enumerate(self._journal._names(samples, sampling).tolist()):
            if (digest, number) in self._places:
                record, place = self._places[digest, number]
                wanted[record].append((row, place))
        rows: list[int] = []
        parts: list[Rollouts] = []
        for record, pairs in wanted.items():
            if (rollouts := record.read(sampling)) is not None:
                rows += [row for row, _ in pairs]
                parts.append(rollouts.take(np.array([place for _, place in pairs])))
        if not parts:
            return np.zeros(0, np.int64), None
        order = np.argsort(rows)
        recorded_samples = samples.take(np.array(rows)[order])
        return np.array(rows)[order], _with_prompts(Rollouts.concatenate(parts).take(order), recorded_samples)


@dataclass(frozen=True)
class _Record:
    """The place of a record's rollouts in its file."""

    file: Path
    start: int
    size: int
    checksum: int

    def read(self, sampling: Sampling) -> Rollouts | None:
        """Return the rollouts, or None for a record that is damaged or has a response that is not done."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                content = file.read(self.size)
            rollouts = read_rollouts(BytesIO(content)) if zlib.crc32(content) == self.checksum else None
            return rollouts if rollouts is not None and is_done(rollouts, sampling).all() else None
        except Exception:  # it may come from anyone
            return None


@dataclass
class _StepRecords:
    """The records of a step that were found so far."""

    places: dict[tuple[int, int], tuple[_Record, int]] = field(default_factory=dict)
    ends: dict[Path, int] = field(default_factory=dict)
    """The end of the last one in each file."""

    def read_new(self, files: Iterable[Path]) -> None:
        """Find the records that were added since."""
        for file in sorted(files):
            for names, record in _records(file, self.ends.get(file, 0)):
                self.places |= {(digest, number): (record, row) for row, (digest, number) in enumerate(names.tolist())}
                self.ends[file] = record.start + record.size


def _records(path: Path, start: int) -> Iterator[tuple[Names, _Record]]:
    """Yield the names and the place of each record of a file from ``start``, up to one that is cut off or damaged."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(start)
        size = fstat(file.fileno()).st_size
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            count, length, checksum = _HEADER.unpack(header)
            if file.tell() + count * _NAME_BYTES + _CHECKSUM.size + length > size:
                return
            names = file.read(count * _NAME_BYTES)
            if file.read(_CHECKSUM.size) != _CHECKSUM.pack(zlib.crc32(header + names)):
                return
            yield np.frombuffer(names, np.uint64).reshape(-1, 2), _Record(path, file.tell(), length, checksum)
            file.seek(length, SEEK_CUR)


def _with_prompts(rollouts: Rollouts, samples: Prompts) -> Rollouts:
    """Return recorded rollouts with the keys, prompts, images and rows of their samples."""
    rows = samples.rows
    if any(rollouts.rows):
        rows = tuple({**row, **added} for row, added in zip(rows, rollouts.rows, strict=True))
    prompts = samples.ids if rollouts.prompt_segments is None else rollouts.prompt_ids
    return replace(rollouts, keys=samples.keys, prompt_ids=prompts, rows=rows, images=samples.images)


def open_journal(run: Path, experiment: Mapping[str, Any]) -> None:
    """Delete what another experiment recorded in a run's folder: its responses come from other weights."""
    folder, text = journal_folder(run), json.dumps(experiment)
    with suppress(OSError, ValueError):
        if (folder / _EXPERIMENT).read_text() == text:
            return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / _EXPERIMENT, text)


def journal_folder(run: Path) -> Path:
    """Return the folder of a run's journal, which may be deleted at any time."""
    return run / "journal"


def remove_journal(run: Path) -> None:
    """Delete the journal of a run that has made all its steps."""
    shutil.rmtree(journal_folder(run), ignore_errors=True)


def remove_records(run: Path, before: int) -> None:
    """Delete the records of the steps before this one, counted from 0."""
    for folder in journal_folder(run).glob("step-*"):
        if int(folder.name.removeprefix("step-")) < before:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(journal: Path, step: int) -> Path:
    return journal / f"step-{step:06d}"
