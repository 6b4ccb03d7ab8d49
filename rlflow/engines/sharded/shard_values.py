"""The values of weights that torch shards: this rank's part of them, and all of them."""

from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def local_values(weight: "Tensor") -> "Tensor":
    """Return the values of a weight that this rank has."""
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


def count_copies(weight: "Tensor") -> int:
    """Return how many ranks of the role have each value of a sharded weight."""
    from torch.distributed import get_world_size
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    parts = (mesh.size(dim) for dim, place in enumerate(weight.placements) if not place.is_replicate())
    return get_world_size() // prod(parts)


def full_values(weight: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """Return a weight in ``dtype``, gathered from the ranks of a replica, which all call this at the same time."""
    from torch.distributed.tensor import DTensor

    values = weight.detach().to(dtype)
    return values.full_tensor() if isinstance(values, DTensor) else values


def cut_weight(module: Any, name: str, mesh: "DeviceMesh", dim: int) -> None:
    """Leave each rank of a mesh its part of a weight that all of them have, divided along a dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn import Parameter

    weight = getattr(module, name)
    part = distribute_tensor(weight.detach(), mesh, [Shard(dim)], src_data_rank=None)
    setattr(module, name, Parameter(part, requires_grad=weight.requires_grad))


def fill_shard(weight: "Tensor", values: "Tensor") -> None:
    """Give a sharded weight this rank's part of ``values``, which all ranks have."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(weight, DTensor)
    shard = distribute_tensor(values.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)
    local_values(weight.detach()).copy_(shard.to_local())
