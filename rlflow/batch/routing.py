"""Routing: the experts of each token in a mixture-of-experts model, as a packed column of records.

A record holds the numbers of a token's experts, layer by layer, in one byte each, or in two for models with more than
256 experts. A sequence has records for its first tokens: at most for all but the last, which no model reads.

Shapes: N tokens, L layers with experts, K experts of a token.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch.packed import Packed

Routing = NDArray[np.void]
"""Records, [N]."""


def record_bytes(num_experts: int, num_layers: int, num_experts_per_tok: int) -> int:
    """Return the size of a record."""
    return num_layers * num_experts_per_tok * _number_type(num_experts).itemsize


def to_records(experts: NDArray[Any], num_experts: int) -> Routing:
    """Return records [N] of the numbers of experts [N, L, K]."""
    num_tokens, num_layers, num_chosen = experts.shape
    numbers = np.ascontiguousarray(experts, _number_type(num_experts)).reshape(num_tokens, num_layers * num_chosen)
    return numbers.view(f"V{record_bytes(num_experts, num_layers, num_chosen)}")[:, 0]


def from_records(records: Routing, num_experts: int, num_layers: int) -> NDArray[Any]:
    """Return the numbers of experts [N, L, K]."""
    dtype = _number_type(num_experts)
    num_chosen = records.itemsize // num_layers // dtype.itemsize
    return np.ascontiguousarray(records).view(dtype).reshape(len(records), num_layers, num_chosen)


def pack_routing(rows: Sequence[Routing | None]) -> Packed | None:
    """Return a column of rows, some of which may have no records; None where no row has any."""
    dtype = next((row.dtype for row in rows if row is not None), None)
    return None if dtype is None else Packed.from_rows([() if row is None else row for row in rows], dtype)


def join_routing(parts: Iterable[Routing | None]) -> Routing | None:
    """Return the records of consecutive tokens; None where no part has any."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known else None


def split_routing(routing: Routing | None, lengths: Sequence[int]) -> list[Routing | None]:
    """Return the parts of these lengths, and what follows them."""
    if routing is None:
        return [None] * (len(lengths) + 1)
    return [*np.split(routing, np.cumsum(lengths, dtype=np.int64))]


def extend_routing(routing: Routing | None, more: Routing | None, end: int) -> Routing | None:
    """Return the records of a sequence's first tokens, followed by those in ``more`` of tokens up to ``end``.

    Where both have a token, the first count. Without records of the tokens between them, ``more`` is left out.
    """
    if more is None:
        return routing
    num_known, start = 0 if routing is None else len(routing), end - len(more)
    return routing if start > num_known else join_routing([routing, more[num_known - start :]])


def keep_first(routing: Routing | None, earlier: Routing | None, end: int) -> Routing | None:
    """Return the records of a sequence that was read again, in which tokens keep those of ``earlier``.

    These are the last ones of the first ``end`` tokens. Without new records the others are zeros.
    """
    if earlier is None or not len(earlier):
        return routing
    records = np.zeros(end, earlier.dtype) if routing is None else routing.copy()
    records[end - len(earlier) : end] = earlier
    return records


def regroup_routing(
    routing: Packed, num_segments: NDArray[np.int64], prompts: NDArray[np.int64], responses: NDArray[np.int64]
) -> Packed:
    """Return a row for each segment, [S], from one for each response, with ``num_segments`` [B].

    ``prompts`` and ``responses`` are the lengths of the segments, [S].
    """
    complete = prompts + responses - 1
    ends = np.cumsum(complete)
    first = np.repeat(np.cumsum(num_segments) - num_segments, num_segments)
    before = (ends - complete) - (ends - complete)[first]
    return routing.regroup(np.clip(np.repeat(routing.lengths, num_segments) - before, 0, complete))


def _number_type(num_experts: int) -> "np.dtype[Any]":
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)
