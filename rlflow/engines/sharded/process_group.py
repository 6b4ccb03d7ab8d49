"""The process group of a role: how ranks connect, how long they wait for each other, and how they share sequences."""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from rlflow.engines.base import EngineSpec
from rlflow.errors import EngineError
from rlflow.resources.models.architecture import heads_divide
from rlflow.system.compat.torch import join_store, serve_store, set_group_timeouts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

    from rlflow.engines.sharded.ulysses import Ulysses
    from rlflow.system.compat.torch import TCPStore

# Enough for a terabyte at 50 MB/s. If a rank dies meanwhile, the others notice at once.
_FILES_TIMEOUT = timedelta(hours=6)
_files_groups: "list[ProcessGroup]" = []


def join_process_group(spec: EngineSpec) -> None:
    """Connect this worker to the other workers of its role, and wait for all of them.

    Raises EngineError if this process already belongs to another role's group.
    """
    import torch
    from torch import distributed

    if distributed.is_initialized():
        current = distributed.get_rank(), distributed.get_world_size()
        if current != (spec.rank, spec.world_size):
            raise EngineError(
                f"role {spec.role}: this process is already rank {current[0]} of {current[1]} of another role, "
                f"and cannot be rank {spec.rank} of {spec.world_size}."
            )
        return
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=rendezvous_store(spec),
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timedelta(minutes=spec.timeout_minutes),
    )
    _files_groups[:] = [distributed.new_group(backend="gloo", timeout=_FILES_TIMEOUT)]


def rendezvous_store(spec: EngineSpec) -> "TCPStore":
    """Return the store at ``spec.address`` through which the ranks learn each other's addresses.

    Rank 0 listens on that address alone: torch would listen on all interfaces, and the store asks for no password.
    Raises OSError if the port is taken.
    """
    host, _, port = spec.address.rpartition(":")
    if spec.rank > 0:
        return join_store(host, int(port), spec.world_size)
    server = socket.create_server((host, int(port)), backlog=spec.world_size + 128)
    return serve_store(server, spec.world_size)


def files_group() -> "ProcessGroup":
    """Return the gloo group, with a time-out of hours, in which ranks wait while one of them reads or writes files.

    NCCL would end a process that waits longer than a collective takes, and keep its GPU busy until then.
    """
    return _files_groups[0]


def wait_for_files() -> None:
    """Wait until every rank of the role has called this."""
    from torch import distributed

    distributed.barrier(group=files_group())


def set_timeouts(spec: EngineSpec) -> None:
    """Give all groups of this process the role's time-out, including those that libraries created with torch's default.

    Every engine calls this at the end of its construction.
    """
    set_group_timeouts(timedelta(minutes=spec.timeout_minutes), spared=_files_groups)


def create_sharding(spec: EngineSpec, model: "PreTrainedModel") -> "Ulysses | None":
    """Return how neighbouring ranks share each sequence; None without sequence parallelism.

    All ranks of the role call this at the same time. Raises EngineError for a model whose attention heads cannot be
    divided among so many ranks.
    """
    size, width = spec.layout.sequence_parallel_size, spec.layout.tensor_parallel_size
    if size == 1:
        return None
    from rlflow.engines.sharded.ulysses import Ulysses

    config = model.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", heads)
    if not heads_divide(heads, key_heads, size * width) or spec.world_size % (size * width):
        raise EngineError(
            f"role {spec.role}: sequence_parallel_size {size} does not divide {heads} attention heads "
            f"({key_heads} of keys and values) and {spec.world_size} ranks."
        )
    return Ulysses(size, width)
