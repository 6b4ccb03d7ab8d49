"""Micro-batches in equal number on all ranks: every pass of a sharded model is one that all ranks make together."""

import numpy as np

from rlflow.batch import Sequences
from rlflow.engines.causal_lm.micro_batches import Index, micro_batches, passes_needed


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
