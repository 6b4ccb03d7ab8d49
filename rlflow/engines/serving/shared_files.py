"""New weights on their way to ranks in other processes."""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlflow.engines.buckets import Bucket, Entry, buckets

if TYPE_CHECKING:
    from torch import Tensor

_FILE_BYTES = 64 * 2**20
_SHARED_MEMORY = Path("/dev/shm")


def memory_folder() -> Path | None:
    """For files that never reach a disk; None where there is none."""
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None


@dataclass(frozen=True)
class SharedFile:
    """A bucket that all ranks read at the same place."""

    path: str
    entries: tuple[Entry, ...]

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Views of the file. Its memory is free when they and the file are gone."""
        return Bucket(self.entries, np.memmap(self.path, np.uint8, "r")).tensors()


def shared_files(weights: "Iterable[tuple[str, Tensor]]") -> Iterator[SharedFile]:
    """All ``weights`` in their order. A file is deleted when the next is asked for."""
    for bucket in buckets(weights, _FILE_BYTES):
        with tempfile.NamedTemporaryFile(prefix="rlflow-weights-", dir=memory_folder()) as file:
            bucket.data.tofile(file.name)
            yield SharedFile(file.name, bucket.entries)
