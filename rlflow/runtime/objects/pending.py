"""What a worker has made and not yet put into the store of its host."""

import pickle
import threading
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Batch, Packed, Records, Repeated, Rollouts
from rlflow.errors import EngineError
from rlflow.packed import Array
from rlflow.runtime.objects.dispatch import opened
from rlflow.runtime.objects.store import Block, Places, Stored, block_of, here
from rlflow.runtime.ray.cluster.hosts import quiet_ray


@dataclass(frozen=True)
class Answer:
    """Of a call: its result, or how much of it is kept until the store has room."""

    result: Any
    """What has no packed columns of its own; None else."""
    nbytes: int
    """Of what is kept; 0 where nothing is."""
    host: str
    """The id of Ray's node that the worker is on."""


class Kept:
    """Results by ticket: a number that whoever asks for them gives.

    The results of several calls under one ticket are handed over as one: one object a field, whatever their number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[int, list[Batch]] = {}

    def add(self, ticket: int | None, result: Any) -> Answer:
        """Keeps a batch that has columns of its own; gives all else back, without a ticket nothing.

        Raises EngineError for uneven columns.
        """
        host = here()
        if ticket is None:
            return Answer(None, 0, host)
        if not isinstance(result, Batch):
            return Answer(result, 0, host)
        check_even(result)
        sizes: list[int] = []
        packed = _as_declared(result).mapped(lambda column: _counted(column, sizes))
        if not sizes:
            return Answer(result, 0, host)
        with self._lock:
            self._results.setdefault(ticket, []).append(packed)
        return Answer(None, sum(sizes), host)

    def put(self, ticket: int) -> Any:
        """All that is kept under the ticket, in the order in which it came, its columns in the store."""
        with self._lock:
            parts = self._results.pop(ticket)
        known: list[Places] = []
        return type(parts[0]).joined(parts).mapped(lambda column: _put(column, known))

    def drop(self, ticket: int) -> None:
        with self._lock:
            self._results.pop(ticket, None)


class Keeper:
    """Answers the calls of a Handover for what it holds. Its methods may be called from several threads."""

    def __init__(self) -> None:
        self.kept = Kept()
        self._held: Any = None

    def hold(self, pickled: bytes) -> None:
        """Comes before the first call. Neither as an argument of the constructor nor with its arrays mapped: the store
        would have it as long as this process is there."""
        self._held = pickle.loads(pickled)

    def call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        """A method of what it holds."""
        return getattr(self._held, method)(*arguments, **named)

    def keep(self, ticket: int | None, method: str, /, *arguments: Any, **named: Any) -> Answer:
        """As ``call``; columns of the result stay in this process until ``put`` is called with the same ticket, and
        without a ticket the result is not wanted. A sent part of a batch arrives as these rows of it.

        Any number of results may be kept under one ticket; what other methods of a subclass make is kept by
        ``self.kept.add``. Raises what the method raises, and EngineError for columns that do not fit each other.
        """
        result = self.call(method, *map(opened, arguments), **named)
        return self.kept.add(ticket, result)

    def put(self, ticket: int) -> Any:
        """All that is kept under the ticket as one batch, in the order in which it came: an object a field in the store
        of this host. Whoever asks has reserved as many bytes as the Answers said (``Handover.put`` does both)."""
        return self.kept.put(ticket)

    def drop(self, ticket: int) -> None:
        """What is kept under the ticket is not wanted any more."""
        self.kept.drop(ticket)


def put(values: Array) -> Block:
    """A copy in the store of this host."""
    return block_of(quiet_ray().put(values), here(), len(values), values.dtype.str)


def check_even(batch: Batch) -> None:
    """Raises EngineError when fields differ in rows, or the columns of response tokens in the lengths of their rows."""
    name, count = type(batch).__name__, len(batch)
    for field in fields(batch):  # type: ignore[arg-type]
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray | Packed | Records | tuple | list) and len(value) != count:
            raise EngineError(f"{name}: {field.name} has {len(value)} rows, and there are {count}.")
        if isinstance(value, Packed) and value.lengths.min(initial=0) < 0:
            raise EngineError(f"{name}: {field.name} has a row of {value.lengths.min()} values.")
    if isinstance(batch, Rollouts):
        for column in ("logprobs", "versions"):
            check_lengths(f"{name}: {column}", getattr(batch, column), batch.response_ids.lengths)


def check_lengths(what: str, column: Packed, lengths: NDArray[np.int64]) -> None:
    """Raises EngineError for a column whose rows are not as long as they should be."""
    if not np.array_equal(column.lengths, lengths):
        same = len(column) == len(lengths)
        row = int(np.flatnonzero(column.lengths != lengths)[0]) if same else 0
        has = f"{column.lengths[row]} values in row {row}, where there are {lengths[row]} tokens" if same else ""
        raise EngineError(f"{what} has {has or f'{len(column)} rows, not {len(lengths)}'}.")


def _as_declared(batch: Batch) -> Batch:
    """With Repeated in the fields that are declared so, and in no others: the same in all that workers make of a kind,
    so that it can be joined as it is."""
    hints = get_type_hints(type(batch))
    changed: dict[str, Packed] = {}
    for name, value in vars(batch).items():
        if not isinstance(value, Packed) or isinstance(value, Stored):
            continue
        if hints[name] is Repeated and not isinstance(value, Repeated):
            changed[name] = Repeated.of(_whole(value))
        elif hints[name] is not Repeated and isinstance(value, Repeated):
            changed[name] = _whole(value)
    return replace(batch, **changed) if changed else batch  # type: ignore[type-var]


def _counted(column: Packed, sizes: list[int]) -> Packed:
    if isinstance(column, Stored | Repeated):
        return column
    sizes.append(column.values.nbytes)
    return _whole(column)


def _whole(column: Packed) -> Packed:
    """Of its own values."""
    values = column.values
    if len(values) != column.offsets[-1]:
        raise EngineError(f"a column has {len(values)} values, and its rows {column.offsets[-1]}.")
    return Packed(values, column.offsets)


def _put(column: Packed, known: list[Places]) -> Packed:
    """Columns that are cut alike get the same places, from ``known``."""
    if isinstance(column, Stored | Repeated):
        return column
    stored = Stored.of(put(column.values), column.lengths)
    same = next((places for places in known if np.array_equal(places.length, column.lengths)), None)
    if same is None:
        known.append(stored.places)
        return stored
    return Stored(stored.blocks, same)
