"""The values of weights that torch shards: this rank's part of them, and all of them."""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from rlflow.system.compat.torch import shard_range

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
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


def row_slices(weight: "Tensor", dtype: "torch.dtype", max_bytes: int) -> "Iterator[tuple[int, Tensor]]":
    """Yield all rows of a weight in order and in ``dtype``, at most ``max_bytes`` at a time, after the first's number.

    A rank sends its rows to the other ranks of its replica, which all iterate at the same time.
    """
    import torch
    from torch.distributed import broadcast
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    mesh, placements, values = weight.device_mesh, weight.placements, local_values(weight.detach())
    here = mesh.get_coordinate()
    assert here is not None
    columns = {dim: cut for dim, place in enumerate(placements) for cut in (1, 2) if place.is_shard(cut)}
    rows = [dim for dim, place in enumerate(placements) if not place.is_replicate() and dim not in columns]
    max_rows = max(1, max_bytes // (prod(weight.shape[1:]) * dtype.itemsize))
    shards = []
    for owner in product(*(range(mesh.size(dim)) if dim in rows else [here[dim]] for dim in range(mesh.ndim))):
        (count, *_), (start, *_) = shard_range(weight, placements, owner)
        shards.append((start, count, owner))
    for start, count, owner in sorted(shards):
        for first in range(0, count, max_rows):
            size = min(max_rows, count - first)
            if owner == tuple(here):
                part = values[first : first + size].to(dtype)
            else:
                part = torch.empty(size, *values.shape[1:], dtype=dtype, device=values.device)
            # Along one dimension of the mesh after the other, among the ranks next to those that have the rows.
            for dim in rows:
                if all(owner[later] == here[later] for later in rows if later > dim):
                    broadcast(part, group=mesh.get_group(dim), group_src=owner[dim])
            for dim, cut in columns.items():
                part = _join_columns(part, mesh.get_group(dim), cut)
            yield start + first, part


def _join_columns(part: "Tensor", group: "ProcessGroup", dim: int) -> "Tensor":
    import torch
    from torch.distributed import all_gather, get_world_size

    parts = [torch.empty_like(part) for _ in range(get_world_size(group))]
    all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


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
