"""The result of a worker's call, checked and put into the object store of its host."""

from dataclasses import fields, replace
from typing import TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Batch, Packed, Records, Repeated, Rollouts, SharedRows
from rlflow.errors import EngineError
from rlflow.runtime.objects.store import RowSpans, StoredColumn, put_array

BatchT = TypeVar("BatchT", bound=Batch)


def put_batch(batch: BatchT) -> BatchT:
    """Put the columns of a batch into the store of this host, each as one object.

    Columns with rows of the same lengths share their spans. Rows that share an array are put once, and what is in a
    store already stays there. Raises EngineError for uneven columns.
    """
    _check_even(batch)
    # Nothing is put before all columns are checked.
    batch = _as_declared(batch).map_packed(
        lambda column: column if isinstance(column, Repeated | SharedRows) else _plain(column)
    )
    known_spans: list[RowSpans] = []

    def put(column: Packed) -> Packed:
        if isinstance(column, StoredColumn):
            return column.with_used_blocks()
        if isinstance(column, Repeated):
            return column
        if isinstance(column, SharedRows):
            distinct, places = column.distinct()
            return StoredColumn.of(put_array(distinct.values), distinct.lengths).take(places)
        stored = StoredColumn.of(put_array(column.values), column.lengths)
        same = next((spans for spans in known_spans if np.array_equal(spans.length, column.lengths)), None)
        if same is None:
            known_spans.append(stored.spans)
            return stored
        return StoredColumn(stored.blocks, same)

    return batch.map_packed(put)


def _check_even(batch: Batch) -> None:
    """Raise EngineError when fields differ in rows, or the columns of response tokens in the lengths of their rows."""
    name, count = type(batch).__name__, len(batch)
    for field in fields(batch):  # type: ignore[arg-type]
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray | Packed | Records | tuple | list) and len(value) != count:
            raise EngineError(f"{name}.{field.name}: expected {count} rows, got {len(value)}.")
        if isinstance(value, Packed) and value.lengths.min(initial=0) < 0:
            raise EngineError(f"{name}.{field.name}: a row has {value.lengths.min()} values.")
    if isinstance(batch, Rollouts):
        for column in ("logprobs", "versions"):
            check_lengths(f"{name}.{column}", getattr(batch, column), batch.response_ids.lengths)


def check_lengths(name: str, column: Packed, lengths: NDArray[np.int64]) -> None:
    """Raise EngineError for a column whose rows do not have the given lengths."""
    if len(column) != len(lengths):
        raise EngineError(f"{name}: expected {len(lengths)} rows, got {len(column)}.")
    if not np.array_equal(column.lengths, lengths):
        row = int(np.flatnonzero(column.lengths != lengths)[0])
        raise EngineError(f"{name}: row {row} has {lengths[row]} tokens and {column.lengths[row]} values.")


def _as_declared(batch: BatchT) -> BatchT:
    """Convert columns to Repeated where the field is declared so, and only there, so that all batches can be joined."""
    hints = get_type_hints(type(batch))
    changed: dict[str, Packed] = {}
    for name, value in vars(batch).items():
        if not isinstance(value, Packed) or isinstance(value, StoredColumn):
            continue
        is_repeated = Repeated in (hints[name], *get_args(hints[name]))
        if is_repeated and not isinstance(value, Repeated):
            changed[name] = Repeated.from_packed(_plain(value))
        elif not is_repeated and isinstance(value, Repeated):
            changed[name] = _plain(value)
    return replace(batch, **changed) if changed else batch  # type: ignore[type-var]


def _plain(column: Packed) -> Packed:
    """Return a column in this process with values of its own. Raises EngineError when they do not fit its rows."""
    if isinstance(column, StoredColumn):
        return column
    values = column.values
    if len(values) != column.offsets[-1]:
        raise EngineError(f"a column has {len(values)} values, and its rows need {column.offsets[-1]}.")
    return Packed(values, column.offsets)
