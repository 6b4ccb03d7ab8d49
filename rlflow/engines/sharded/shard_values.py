"""The values of weights that torch shards: this rank's part of them, and all of them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def local_values(weight: "Tensor") -> "Tensor":
    """Return the values of a weight that this rank has."""
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


def full_values(weight: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """Return a weight in ``dtype``, gathered from the ranks of a replica, which all call this at the same time."""
    from torch.distributed.tensor import DTensor

    values = weight.detach().to(dtype)
    return values.full_tensor() if isinstance(values, DTensor) else values


def fill_shard(weight: "Tensor", values: "Tensor") -> None:
    """Give a sharded weight this rank's part of ``values``, which all ranks have."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(weight, DTensor)
    shard = distribute_tensor(values.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)
    local_values(weight.detach()).copy_(shard.to_local())
