"""New weights on their way to ranks in other processes."""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_FILE_BYTES = 64 * 2**20
_SHARED_MEMORY = Path("/dev/shm")
# Of where a tensor begins in its file: a multiple of the size of every type.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""
    start: int
    """Its first byte in the file."""


@dataclass(frozen=True)
class SharedFile:
    """Tensors that all ranks read at the same place."""

    path: str
    num_bytes: int
    entries: tuple[Entry, ...]

    def tensors(self) -> "list[tuple[str, Tensor]]":
        """Views of the file. Its memory is free when they and the file are gone."""
        import torch

        content = torch.from_file(self.path, shared=True, size=self.num_bytes, dtype=torch.uint8)
        found = []
        for entry in self.entries:
            dtype = getattr(torch, entry.dtype)
            num_bytes = dtype.itemsize * torch.Size(entry.shape).numel()
            found.append((entry.name, content[entry.start :][:num_bytes].view(dtype).view(entry.shape)))
        return found


def shared_files(weights: "Iterable[tuple[str, Tensor]]") -> Iterator[SharedFile]:
    """All ``weights`` in their order. A file is deleted when the next is asked for."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if batch and size + tensor.nbytes > _FILE_BYTES:
            yield from _file(batch)
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield from _file(batch)


def _file(weights: "list[tuple[str, Tensor]]") -> Iterator[SharedFile]:
    entries, end = [], 0
    for name, tensor in weights:
        entries.append(Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), end))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.NamedTemporaryFile(prefix="rlflow-weights-", dir=folder) as file:
        file.truncate(end)
        shared = SharedFile(file.name, end, tuple(entries))
        for (_, target), (_, tensor) in zip(shared.tensors(), weights, strict=True):
            target.copy_(tensor)
        del target
        yield shared
