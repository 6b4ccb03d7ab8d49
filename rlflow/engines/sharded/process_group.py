"""The address at which the ranks of a role find one another.

Micro-batches in equal number on all ranks: every pass of a sharded model is one that all ranks make together.

The processes of a role: how they meet, how long they wait for one another, and how they share sequences.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from rlflow.batch import Sequences
from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.micro_batches import Index, micro_batches, passes_needed
from rlflow.errors import EngineError
from rlflow.resources.models.architecture import heads_divide

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

    from rlflow.engines.causal_lm.packing import Spread


def meeting_place(spec: EngineSpec) -> "TCPStore":
    """Return the store at ``spec.address`` by which the ranks exchange their own addresses.

    Rank 0 listens on that address alone; torch would listen on all interfaces, and the store asks for no password.
    Raises OSError where the port is taken.
    """
    from torch._C._distributed_c10d import TCPStore

    host, _, port = spec.address.rpartition(":")
    if spec.rank > 0:
        return TCPStore(host, int(port), spec.world_size, is_master=False)
    listening = socket.create_server((host, int(port)), backlog=spec.world_size + 128)
    return TCPStore(host, int(port), spec.world_size, is_master=True, master_listen_fd=listening.detach())


def rounds(sequences: Sequences, max_tokens: int) -> tuple[list[Index], int]:
    """Rows for each pass, and the number of passes that count: those after repeat a row that has been.

    Called by all ranks together, each with its own ``sequences``.
    """
    import torch

    if torch.distributed.get_world_size() == 1:
        pieces = micro_batches(sequences, max_tokens)
        return pieces, len(pieces)
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    most = torch.tensor(passes_needed(sequences, max_tokens), device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return repeated(micro_batches(sequences, max_tokens, int(most)), sequences, int(most))


def repeated(pieces: list[Index], sequences: Sequences, count: int) -> tuple[list[Index], int]:
    """A rank with fewer rows than passes goes through its shortest row again, since a pass cannot be empty."""
    shortest = np.argsort(sequences.prompt_ids.lengths + sequences.response_ids.lengths)[:1]
    return pieces + [shortest] * (count - len(pieces)), len(pieces)


# As long as a terabyte takes at 50 MB/s, and somewhat more. If a rank dies meanwhile, the others notice at once.
_FILES_LIMIT = timedelta(hours=6)
_files_groups: "list[ProcessGroup]" = []


def meet(spec: EngineSpec) -> None:
    """Waits for the other workers of the role. Raises EngineError when this process is of another group already."""
    import torch
    from torch import distributed

    if distributed.is_initialized():
        place = distributed.get_rank(), distributed.get_world_size()
        if place != (spec.rank, spec.world_size):
            raise EngineError(
                f"role {spec.role}: this process is rank {place[0]} of {place[1]} of another role already, "
                f"and cannot be rank {spec.rank} of {spec.world_size}."
            )
        return
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=meeting_place(spec),
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timedelta(minutes=spec.timeout_minutes),
    )
    _files_groups[:] = [distributed.new_group(backend="gloo", timeout=_FILES_LIMIT)]


def files_group() -> "ProcessGroup":
    """Return the group by which ranks wait while one of them reads or writes files: gloo, with a time-out of hours.

    NCCL ends a process that waits for longer than an exchange takes, and keeps its GPU busy until then.
    """
    return _files_groups[0]


def wait_for_files() -> None:
    """Wait until every rank of the role has come here."""
    from torch import distributed

    distributed.barrier(group=files_group())


def set_timeouts(spec: EngineSpec) -> None:
    """Give all groups of this process the role's time-out, also those of libraries, which have torch's own by default.

    Every engine calls it when it is built.
    """
    _set_timeouts(timedelta(minutes=spec.timeout_minutes))


@contextmanager
def while_files_move(spec: EngineSpec) -> Iterator[None]:
    """Let exchanges inside a library's reading or writing of files take as long as ``files_group`` would."""
    _set_timeouts(_FILES_LIMIT)
    try:
        yield
    finally:
        set_timeouts(spec)


def _set_timeouts(timeout: timedelta) -> None:
    from torch.distributed import distributed_c10d

    for group in distributed_c10d._world.pg_map:
        if group not in _files_groups:
            distributed_c10d._set_pg_timeout(timeout, group)


def spread_of(spec: EngineSpec, model: "PreTrainedModel") -> "Spread | None":
    """How neighbouring ranks share each sequence, if they do. Called by all ranks of the role together.

    Raises EngineError for a model whose attention cannot be shared by so many.
    """
    size = spec.layout.sequence_parallel_size
    if size == 1:
        return None
    from rlflow.engines.sharded.ulysses import Ulysses

    heads = model.config.num_attention_heads
    keys = getattr(model.config, "num_key_value_heads", heads)
    if not heads_divide(heads, keys, size) or spec.world_size % size:
        raise EngineError(
            f"role {spec.role}: sequence_parallel_size {size} does not divide {heads} attention heads "
            f"({keys} of keys and values) and {spec.world_size} ranks."
        )
    return Ulysses(size)
