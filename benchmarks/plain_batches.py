"""Plain batches that move from four workers to four workers: the baselines of ``benchmarks.data_plane``.

In the padded ones, all rows have the length of the longest. Integers have 64 bits, and there is an attention mask, as
tokenizers return them. Packed ones have the rows of a field one after the other, without padding.
Shapes: B rows of a worker, L tokens of the longest row.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.runtime.objects.ray_api import import_ray

MICRO_BATCH = 32
_MASK, _OFFSETS = "attention_mask", "offsets"


def checksum(values: NDArray[Any]) -> int:
    """Return a checksum that depends neither on padding nor on the number of bits."""
    return int(np.bitwise_xor.reduce(values.ravel().view(f"i{values.itemsize}"))) if values.size else 0


class Padding:
    """A worker's part of the batch, row by row, as an engine has generated it."""

    def __init__(self, rows: Mapping[str, Sequence[NDArray[Any]]], longest: int) -> None:
        """Take the rows of every field; ``ids`` must not contain 0."""
        self._rows = rows
        self._longest = longest

    def part(self, as_torch: bool) -> Mapping[str, Any]:
        """Return every field as [B, L]."""
        arrays = self._padded(slice(0, len(self._rows["ids"])))
        return _tensors(arrays) if as_torch else arrays

    def put_micro_batches(self, as_torch: bool) -> list[Any]:
        """Put micro-batches of ``MICRO_BATCH`` rows into the object store and return their references."""
        references = []
        for start in range(0, len(self._rows["ids"]), MICRO_BATCH):
            arrays = self._padded(slice(start, start + MICRO_BATCH))
            references.append(import_ray().put(_tensors(arrays) if as_torch else arrays))
        return references

    def put_packed(self) -> list[Any]:
        """Put micro-batches of ``MICRO_BATCH`` rows, packed, into the object store and return their references."""
        references = []
        for start in range(0, len(self._rows["ids"]), MICRO_BATCH):
            part = slice(start, start + MICRO_BATCH)
            offsets = np.cumsum([0, *(len(row) for row in self._rows["ids"][part])])
            packed = {name: np.concatenate(rows[part]) for name, rows in self._rows.items()}
            references.append(import_ray().put(packed | {_OFFSETS: offsets}))
        return references

    def read(self, references: Sequence[Any]) -> int:
        """Return a checksum over every value of the fields. Mask and offsets are read as well, but not counted."""
        total = 0
        for reference in references:
            read = {name: checksum(np.asarray(array)) for name, array in import_ray().get(reference).items()}
            for name in (_MASK, _OFFSETS):
                read.pop(name, None)
            total ^= int(np.bitwise_xor.reduce(list(read.values())))
        return total

    def _padded(self, part: slice) -> dict[str, NDArray[Any]]:
        arrays = {}
        for name, rows in self._rows.items():
            kind = np.int64 if rows[0].dtype == np.int32 else rows[0].dtype
            arrays[name] = np.zeros((len(rows[part]), self._longest), kind)
            for line, row in zip(arrays[name], rows[part], strict=True):
                line[: len(row)] = row
        return arrays | {_MASK: (arrays["ids"] > 0).astype(np.int64)}


class Controller:
    """The process that runs the loop. It moves a batch between ``actors``, each of which holds a Padding."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    def by_reference(self, as_torch: bool) -> int:
        """Send padded micro-batches to the ranks in turn, directly from worker to worker."""
        return self._by_reference("put_micro_batches", as_torch)

    def packed_by_reference(self) -> int:
        """Send packed micro-batches to the ranks in turn, directly from worker to worker."""
        return self._by_reference("put_packed")

    def _by_reference(self, put: str, *arguments: bool) -> int:
        made = import_ray().get([actor.call.remote(put, *arguments) for actor in self._actors])
        references = [reference for part in made for reference in part]
        return self._read([references[rank :: len(self._actors)] for rank in range(len(self._actors))])

    def through_it(self, as_torch: bool) -> int:
        """Fetch all parts, concatenate them, and send each rank its rows."""
        ray = import_ray()
        parts = ray.get([actor.call.remote("part", as_torch) for actor in self._actors])
        join: Callable[[Any], Any] = import_module("torch").cat if as_torch else np.concatenate
        whole = {name: join([part[name] for part in parts]) for name in parts[0]}
        del parts
        count = len(whole["ids"]) // len(self._actors)
        chunks = []
        for start in range(0, len(whole["ids"]), count):
            chunk = {name: array[start : start + count] for name, array in whole.items()}
            if as_torch:  # Ray would send the whole tensor behind a view
                chunk = {name: tensor.clone() for name, tensor in chunk.items()}
            chunks.append([ray.put(chunk)])
        return self._read(chunks)

    def _read(self, references: Sequence[Sequence[Any]]) -> int:
        """Let each actor read its references; inside a list, Ray passes a reference on without fetching it."""
        sums = [actor.call.remote("read", own) for actor, own in zip(self._actors, references, strict=True)]
        return int(np.bitwise_xor.reduce(import_ray().get(sums)))


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    torch = import_module("torch")
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
