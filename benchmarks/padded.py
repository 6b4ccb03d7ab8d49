"""A batch in padded arrays, handed from four workers to four workers: what ``benchmarks.data_plane`` compares with.

All rows are as long as the longest of the batch. Whole numbers have 64 bits, and there is the attention mask that
padding needs, as tokenizers give them. Shapes: B rows of a worker, L tokens of the longest.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.runtime.objects.ray_api import import_ray

MICRO_BATCH = 32
_MASK = "attention_mask"


def checksum(values: NDArray[Any]) -> int:
    """Padding does not change it, nor does the number of bits."""
    return int(np.bitwise_xor.reduce(values.ravel().view(f"i{values.itemsize}"))) if values.size else 0


class Padding:
    """In a worker: its part of the batch, row by row, as an engine has written it."""

    def __init__(self, rows: Mapping[str, Sequence[NDArray[Any]]], longest: int) -> None:
        """``rows`` by field, of which ``ids`` has no nought."""
        self._rows = rows
        self._longest = longest

    def part(self, as_torch: bool) -> Mapping[str, Any]:
        """[B, L] of every field."""
        arrays = self._padded(slice(0, len(self._rows["ids"])))
        return _tensors(arrays) if as_torch else arrays

    def put_micro_batches(self, as_torch: bool) -> list[Any]:
        """References to ``MICRO_BATCH`` rows each."""
        references = []
        for start in range(0, len(self._rows["ids"]), MICRO_BATCH):
            arrays = self._padded(slice(start, start + MICRO_BATCH))
            references.append(import_ray().put(_tensors(arrays) if as_torch else arrays))
        return references

    def read(self, references: Sequence[Any]) -> int:
        """A checksum over every value of the fields, and over the mask, of which nothing is returned."""
        total = 0
        for reference in references:
            read = {name: checksum(np.asarray(array)) for name, array in import_ray().get(reference).items()}
            read.pop(_MASK)
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
    """In the process that runs the loop: hands a batch from ``actors``, which hold a Padding each, to the same."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    def by_reference(self, as_torch: bool) -> int:
        """Micro-batches go to the ranks in turn, straight from worker to worker."""
        made = import_ray().get([actor.call.remote("put_micro_batches", as_torch) for actor in self._actors])
        references = [reference for part in made for reference in part]
        return self._read([references[rank :: len(self._actors)] for rank in range(len(self._actors))])

    def through_it(self, as_torch: bool) -> int:
        """All parts come here, are joined to one batch, and a rank's rows are sent."""
        ray = import_ray()
        parts = ray.get([actor.call.remote("part", as_torch) for actor in self._actors])
        join: Callable[[Any], Any] = import_module("torch").cat if as_torch else np.concatenate
        whole = {name: join([part[name] for part in parts]) for name in parts[0]}
        del parts
        count = len(whole["ids"]) // len(self._actors)
        chunks = []
        for start in range(0, len(whole["ids"]), count):
            chunk = {name: array[start : start + count] for name, array in whole.items()}
            if as_torch:  # of a view Ray would send the whole
                chunk = {name: tensor.clone() for name, tensor in chunk.items()}
            chunks.append([ray.put(chunk)])
        return self._read(chunks)

    def _read(self, references: Sequence[Sequence[Any]]) -> int:
        """In a list Ray hands a reference on as it is."""
        sums = [actor.call.remote("read", own) for actor, own in zip(self._actors, references, strict=True)]
        return int(np.bitwise_xor.reduce(import_ray().get(sums)))


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    torch = import_module("torch")
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
