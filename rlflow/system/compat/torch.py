"""Private names of torch."""

from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def set_group_timeouts(timeout: timedelta, spared: "Collection[ProcessGroup]") -> None:
    """Change the time-out of all process groups of this process, except for those in ``spared``.

    torch has no list of groups, and takes a time-out only when a group is created, which other libraries do.
    """
    from torch.distributed import distributed_c10d

    for group in distributed_c10d._world.pg_map:
        if group not in spared:
            distributed_c10d._set_pg_timeout(timeout, group)
