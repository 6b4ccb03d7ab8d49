"""Tensors that give their GPU memory up and get it back, with every view of it."""

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module


class Parked:
    """The memory behind ``tensors`` on ``device``, held by the host until ``bring_back``.

    Storages are emptied, not tensors replaced: DeepSpeed keeps many views of a few large buffers.
    """

    def __init__(self, tensors: "Iterable[Tensor]", device: "torch.device") -> None:
        import torch

        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors
            if tensor.device == device and tensor.untyped_storage().nbytes()
        }
        self._held = []
        for storage in storages.values():
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda").untyped_storage()
            copy.copy_(storage)
            self._held.append((storage, copy))
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def bring_back(self) -> None:
        for storage, copy in self._held:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._held = []


def tensors_of(module: "Module", optimizer: Any) -> "Iterator[Tensor]":
    """All weights, their shards, and what DeepSpeed's optimizer holds between steps."""
    for tensor in [*module.parameters(), *module.buffers()]:
        yield tensor.data
        if hasattr(tensor, "ds_tensor"):
            yield tensor.ds_tensor.data
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
