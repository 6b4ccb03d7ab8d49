"""Private names of torch."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from socket import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore as TCPStore
    from torch.distributed import ProcessGroup


def allocator_settings() -> str:
    """Return the settings of the GPU memory allocator. torch documents the environment variable, not its value now."""
    import torch

    settings: str = torch._C._accelerator_getAllocatorSettings()
    return settings


def set_allocator_settings(settings: str) -> None:
    """Change the settings of the GPU memory allocator; options that they do not name are reset.

    torch documents only the environment variable, which it reads once.
    """
    import torch

    torch._C._accelerator_setAllocatorSettings(settings)


def join_store(host: str, port: int, world_size: int) -> "TCPStore":
    """Return a store that another process serves."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, world_size, is_master=False)


def serve_store(server: socket, world_size: int) -> "TCPStore":
    """Return a store that this process serves on a listening socket, which the store takes over.

    Without the undocumented argument for a socket, torch listens on all interfaces.
    """
    from torch._C._distributed_c10d import TCPStore

    host, port = server.getsockname()[:2]
    return TCPStore(host, port, world_size, is_master=True, master_listen_fd=server.detach())


def set_group_timeouts(timeout: timedelta, spared: "Collection[ProcessGroup]") -> None:
    """Change the time-out of all process groups of this process, except for those in ``spared``.

    torch has no list of groups, and takes a time-out only when a group is created, which other libraries do.
    """
    from torch.distributed import distributed_c10d

    for group in distributed_c10d._world.pg_map:
        if group not in spared:
            distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def computing_with(module: Any, weights: Mapping[str, Any]) -> Iterator[None]:
    """Let a module's forward pass use other tensors, with gradients of their own, for its weights."""
    before = dict(module._parameters)
    module._parameters.update(weights)
    try:
        yield
    finally:
        module._parameters.update(before)


def shard_range(
    weight: Any, placements: Sequence[Any], coordinate: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a shard of a DTensor that is placed so, and where it begins in each dimension.

    The shard is that of the rank at a ``coordinate`` of the mesh, by default this rank's.
    """
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh = weight.device_mesh
    place = list(mesh.get_coordinate() if coordinate is None else coordinate)
    return _compute_local_shape_and_global_offset(weight.shape, mesh.shape, place, placements)
