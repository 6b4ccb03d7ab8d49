"""The shares of a batch by the host that its samples lie on, for nodes that run there.

A unit is what a node needs at once: one sample, or the samples of a prompt.

Shapes: B samples in G units, H hosts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Batch, Packed, Sequences
from rlflow.errors import EngineError
from rlflow.nodes.base import Unit
from rlflow.runtime.objects.store import RowSpans, StoredColumn

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class HostShare:
    """The units that a node processes on one host."""

    host: str
    """The id of the Ray node."""
    inputs: Mapping[str, Batch]
    """The inputs of the node, with only these units."""
    units: Index
    """The places of these units among all G."""


def divide_by_host(inputs: Mapping[str, Any], unit: Unit) -> list[HostShare]:
    """Return the share of each host that holds responses, for a node that needs one ``unit`` at once.

    A unit goes to the host with the most tokens of its responses. There are no shares where nothing can be divided:
    without responses in object stores, and for inputs whose rows do not belong to units.
    """
    samples = next((batch for batch in inputs.values() if isinstance(batch, Sequences)), None)
    size = 0 if samples is None else _unit_size(samples, unit)
    if samples is None or not size or not isinstance(column := samples.response_ids, StoredColumn):
        return []
    num_units = len(samples) // size
    if any(not isinstance(batch, Batch) or len(batch) % num_units for batch in inputs.values()):
        return []
    numbers = {host: number for number, host in enumerate(dict.fromkeys(block.host for block in column.blocks))}
    host_of_row = np.array([numbers[block.host] for block in column.blocks])[column.spans.block]
    tokens = np.zeros((num_units, len(numbers)), np.int64)
    np.add.at(tokens, (np.arange(len(samples)) // size, host_of_row), column.lengths)
    host_of_unit = tokens.argmax(1)
    shares = []
    for host, number in numbers.items():
        if len(units := np.flatnonzero(host_of_unit == number)):
            parts = {name: without_other_blocks(batch.take_units(units, num_units)) for name, batch in inputs.items()}
            shares.append(HostShare(host, parts, units))
    return shares


def join_outputs(shares: Sequence[HostShare], outputs: Sequence[Batch]) -> Batch:
    """Return the outputs for all shares as one batch, in the order of the units that were divided.

    Raises EngineError for outputs in which not every unit has equally many rows.
    """
    units = np.concatenate([share.units for share in shares])
    joined = type(outputs[0]).concatenate(outputs)
    counts = [len(output) / len(share.units) for output, share in zip(outputs, shares, strict=True)]
    if len(set(counts)) > 1 or len(joined) % len(units):
        raise EngineError(
            f"expected equally many rows for each sample or prompt, got {', '.join(f'{mean:g}' for mean in counts)} on"
            " average from the hosts. Fix: a node with other rows has unit='batch'."
        )
    return joined.take_units(np.argsort(units), len(units))


def without_other_blocks(batch: Batch) -> Batch:
    """Return the batch with references only to the blocks that its rows lie in."""
    known: dict[int, tuple[Index, RowSpans]] = {}

    def shorten(column: Packed) -> Packed:
        if not isinstance(column, StoredColumn):
            return column
        spans = column.spans
        if id(spans) not in known:
            used, numbers = np.unique(spans.block, return_inverse=True)
            known[id(spans)] = used, RowSpans(numbers, spans.start, spans.length)
        used, shortened = known[id(spans)]
        return StoredColumn([column.blocks[number] for number in used.tolist()], shortened)

    return batch.map_packed(shorten)


def _unit_size(samples: Sequences, unit: Unit) -> int:
    """Return the number of samples in each unit; 0 where units differ in size, or there are none."""
    if not len(samples) or unit == "sample":
        return samples.unit_size if len(samples) else 0
    prompts = samples.keys[:, :2]
    size = int((prompts == prompts[0]).all(1).sum())
    if len(samples) % size:
        return 0
    groups = prompts.reshape(-1, size, 2)
    return size if (groups == groups[:, :1]).all() else 0
