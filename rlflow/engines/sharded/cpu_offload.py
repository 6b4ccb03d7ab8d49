"""Tensors that give their GPU memory up and get it back, with every view of it."""

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, UntypedStorage
    from torch.nn import Module

# torch rounds memory that a GPU reads directly up to a power of two, and so does not round this.
_CHUNK_BYTES = 256 * 2**20


class Parked:
    """Memory of ``device`` that the host holds meanwhile.

    Storages are emptied, not tensors replaced: DeepSpeed keeps many views of a few large buffers.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._storages: list[tuple[UntypedStorage, int]] = []
        """With their bytes."""
        self._chunks: list[Tensor] = []
        """Kept from one time to the next: to allocate them takes longer than to fill them."""

    @property
    def held_bytes(self) -> int:
        return sum(size for _, size in self._storages)

    def put_away(self, tensors: "Iterable[Tensor]") -> None:
        """The memory behind ``tensors``, but for what is put away already. Not before all of the last time is back."""
        import torch

        assert not self._storages
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors
            if tensor.device == self._device and tensor.untyped_storage().nbytes()
        }
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        for there, here in self._pieces():
            here.copy_(there)
        for storage, _ in self._storages:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def bring_back(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)
        for there, here in self._pieces():
            there.copy_(here)
        self._storages = []

    def _pieces(self) -> "Iterator[tuple[Tensor, Tensor]]":
        """The bytes of all storages and their places with the host, one storage after the other."""
        import torch

        at = 0
        for storage, size in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            done = 0
            while done < size:
                chunk, place = divmod(at, _CHUNK_BYTES)
                if chunk == len(self._chunks):
                    pinned = self._device.type == "cuda"
                    self._chunks.append(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned))
                count = min(size - done, _CHUNK_BYTES - place)
                yield whole[done : done + count], self._chunks[chunk][place : place + count]
                done, at = done + count, at + count


def weights_of(module: "Module") -> "Iterator[Tensor]":
    """All weights and their shards."""
    for tensor in [*module.parameters(), *module.buffers()]:
        yield tensor.data
        if hasattr(tensor, "ds_tensor"):
            yield tensor.ds_tensor.data


def state_of(optimizer: Any) -> "Iterator[Tensor]":
    """What DeepSpeed's optimizer holds between steps, in part views of the weights; None holds nothing."""
    yield from _within(vars(optimizer) if optimizer is not None else {}, depth=4)
    inner = getattr(optimizer, "optimizer", optimizer)
    yield from _within(getattr(inner, "state", {}), depth=2)
    yield from _within(getattr(inner, "param_groups", []), depth=3)


def _within(value: Any, depth: int) -> "Iterator[Tensor]":
    import torch

    if isinstance(value, torch.Tensor):
        yield value.data
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _within(each, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for each in value:
            yield from _within(each, depth - 1)
    elif depth and is_dataclass(value):
        # Where gradients are collected before they are reduced.
        yield from _within(vars(value), depth)
