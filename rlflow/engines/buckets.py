"""Weights on their way between processes: in buckets of bounded size, so that no process holds all of them twice."""

import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 32 * 2**20
# Of where a tensor begins in its bucket: a multiple of the size of every type.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""
    start: int
    """Its first byte in the bucket."""


@dataclass(frozen=True, eq=False)
class Bucket:
    entries: tuple[Entry, ...]
    data: NDArray[np.uint8]
    """Bytes of all tensors. One array, since Ray hands arrays from process to process without a copy."""

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Views of the bucket, which nobody may write to."""
        import torch

        for entry in self.entries:
            dtype = getattr(torch, entry.dtype)
            end = entry.start + int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                flat = torch.from_numpy(self.data[entry.start : end])
            yield entry.name, flat.view(dtype).view(entry.shape)


def buckets(
    weights: "Iterable[tuple[str, Tensor]]", most: int = BUCKET_BYTES, *, keep: bool = True
) -> Generator[Bucket]:
    """All ``weights`` in their order, ``most`` bytes at a time; a larger tensor has a bucket of its own.

    A bucket is good until the next is asked for: new memory costs more than what is written to it. Without ``keep`` the
    same buckets come empty.
    """
    import torch

    entries: list[Entry] = []
    data = np.empty(most if keep else 0, np.uint8)
    size = 0
    for name, tensor in weights:
        if entries and size + tensor.nbytes > most:
            yield Bucket(tuple(entries), data[:size])
            entries, size = [], 0
        if keep:
            content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            if len(content) > len(data):
                data = np.empty(len(content), np.uint8)
            data[size : size + len(content)] = content
        entries.append(Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), size))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if entries:
        yield Bucket(tuple(entries), data[:size])
