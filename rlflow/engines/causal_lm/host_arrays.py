"""The way of arrays from the host to the model's device."""

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(array: NDArray[Any], device: "torch.device") -> "Tensor":
    """Return the array as a tensor on the device. On a GPU the host does not wait for the copy."""
    import torch

    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from other memory makes the host wait until the GPU has done all its work.
    return tensor.pin_memory().to(device, non_blocking=True)
