"""Weights packed into buckets of bounded size, so that they travel between processes without a second full copy."""

import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.resources.memory.processes import BUCKET_BYTES

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_BYTES = 256 * 2**20
"""The largest weight that travels whole. Of a larger one come experts under names of their own, or rows in parts."""
# All parts of a weight but the last have this after its name.
_MORE = "+"
# Tensors start at multiples of this, which is a multiple of every dtype's size.
_ALIGNMENT = 64


def part_name(name: str, *, is_last: bool) -> str:
    """Return the name under which some rows of a weight travel, in order."""
    return name if is_last else name + _MORE


def join_parts(weights: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
    """Yield weights with all of their rows."""
    import torch

    parts: list[Tensor] = []
    for name, tensor in weights:
        parts.append(tensor)
        if not name.endswith(_MORE):
            yield name, tensor if len(parts) == 1 else torch.cat(parts)
            parts = []


@dataclass(frozen=True)
class TensorEntry:
    """The description of one tensor in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The name of the dtype in torch: ``float32``."""
    start: int
    """The offset of its first byte in the bucket."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Several tensors in one array of bytes."""

    entries: tuple[TensorEntry, ...]
    data: NDArray[np.uint8]
    """The bytes of all tensors. A single array, because Ray passes arrays between processes without a copy."""

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield the name of each tensor and a read-only view of its values."""
        import torch

        for entry in self.entries:
            dtype = getattr(torch, entry.dtype)
            end = entry.start + int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                flat = torch.from_numpy(self.data[entry.start : end])
            yield entry.name, flat.view(dtype).view(entry.shape)


def build_buckets(
    weights: "Iterable[tuple[str, Tensor]]", max_bytes: int = BUCKET_BYTES, *, copy_data: bool = True
) -> Generator[Bucket]:
    """Yield all ``weights`` in order, in buckets of ``max_bytes``; a larger tensor gets a bucket of its own.

    All buckets reuse the same memory, because allocating new memory costs more than filling it: a bucket is valid
    until the next one is requested. With ``copy_data=False`` the buckets have the same entries but no bytes, for ranks
    that only take part in gathering the weights.
    """
    import torch

    entries: list[TensorEntry] = []
    data = np.empty(max_bytes if copy_data else 0, np.uint8)
    size = 0
    for name, tensor in weights:
        if entries and size + tensor.nbytes > max_bytes:
            yield Bucket(tuple(entries), data[:size])
            entries, size = [], 0
        if copy_data:
            content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            if len(content) > len(data):
                data = np.empty(len(content), np.uint8)
            data[size : size + len(content)] = content
        entries.append(TensorEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), size))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if entries:
        yield Bucket(tuple(entries), data[:size])
