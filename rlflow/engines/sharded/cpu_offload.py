"""Offloading: tensors that move their GPU memory to the host and back, without breaking any view of them."""

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, UntypedStorage
    from torch.nn import Module

# Pinned memory is rounded up to a power of two, so chunks of this size waste none.
_CHUNK_BYTES = 256 * 2**20


class OffloadedMemory:
    """Memory of ``device`` that is held in host memory for a while.

    Storages are emptied rather than tensors replaced, because DeepSpeed keeps many views of a few large buffers.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._storages: list[tuple[UntypedStorage, int]] = []
        """The emptied storages, with their sizes in bytes."""
        self._chunks: list[Tensor] = []
        """Host memory, kept from one time to the next: allocating it takes longer than filling it."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that are offloaded now."""
        return sum(size for _, size in self._storages)

    def offload(self, tensors: "Iterable[Tensor]") -> None:
        """Move the memory of ``tensors`` to the host, except for what is empty already; torch still caches it.

        Everything offloaded before must have been restored.
        """
        assert not self._storages
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors
            if tensor.device == self._device and tensor.untyped_storage().nbytes()
        }
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        for on_device, on_host in self._pieces():
            on_host.copy_(on_device)
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Move everything back to the device."""
        for storage, size in self._storages:
            storage.resize_(size)
        for on_device, on_host in self._pieces():
            on_device.copy_(on_host)
        self._storages = []

    def _pieces(self) -> "Iterator[tuple[Tensor, Tensor]]":
        """Yield the bytes of all storages, one storage after the other, with their places in host memory."""
        import torch

        position = 0
        for storage, size in self._storages:
            content = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            done = 0
            while done < size:
                chunk, start = divmod(position, _CHUNK_BYTES)
                if chunk == len(self._chunks):
                    pinned = self._device.type == "cuda"
                    self._chunks.append(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned))
                count = min(size - done, _CHUNK_BYTES - start)
                yield content[done : done + count], self._chunks[chunk][start : start + count]
                done, position = done + count, position + count


def weight_tensors(module: "Module") -> "Iterator[Tensor]":
    """Yield all weights and buffers of a module, and their ZeRO-3 shards."""
    for tensor in [*module.parameters(), *module.buffers()]:
        yield tensor.data
        if hasattr(tensor, "ds_tensor"):
            yield tensor.ds_tensor.data


def optimizer_tensors(optimizer: Any) -> "Iterator[Tensor]":
    """Yield what DeepSpeed's optimizer holds between steps, partly views of the weights; nothing for None."""
    yield from _nested_tensors(vars(optimizer) if optimizer is not None else {}, depth=4)
    inner = getattr(optimizer, "optimizer", optimizer)
    yield from _nested_tensors(getattr(inner, "state", {}), depth=2)
    yield from _nested_tensors(getattr(inner, "param_groups", []), depth=3)


def _nested_tensors(value: Any, depth: int) -> "Iterator[Tensor]":
    import torch

    if isinstance(value, torch.Tensor):
        yield value.data
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _nested_tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _nested_tensors(item, depth - 1)
    elif depth and is_dataclass(value):
        # DeepSpeed's buckets, in which gradients are collected before they are reduced.
        yield from _nested_tensors(vars(value), depth)
