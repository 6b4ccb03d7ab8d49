"""Micro-batches in equal number on all ranks: every pass of a sharded model is one that all ranks make together."""

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Sequences
from rlflow.engines.causal_lm.packing import micro_batches

Index = NDArray[np.int64]


def rounds(sequences: Sequences, max_tokens: int) -> tuple[list[Index], int]:
    """Rows for each pass, and the number of passes that count: those after repeat a row that has been.

    Called by all ranks together, each with its own ``sequences``.
    """
    import torch

    pieces = micro_batches(sequences, max_tokens)
    if torch.distributed.get_world_size() == 1:
        return pieces, len(pieces)
    most = torch.tensor(len(pieces), device="cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return evened(pieces, sequences, int(most))


def evened(pieces: list[Index], sequences: Sequences, count: int) -> tuple[list[Index], int]:
    """Cut further until there are ``count``; where there are too few rows, the shortest is repeated."""
    pieces = list(pieces)
    while len(pieces) < count:
        at = max(range(len(pieces)), key=lambda piece: len(pieces[piece]))
        if len(pieces[at]) == 1:
            break
        pieces[at : at + 1] = np.array_split(pieces[at], 2)
    shortest = np.argsort(sequences.prompt_ids.lengths + sequences.response_ids.lengths)[:1]
    return pieces + [shortest] * (count - len(pieces)), len(pieces)
