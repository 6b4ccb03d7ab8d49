"""A worker process around one object: calls of its methods, whose results it puts into the store, and signs of life."""

import ctypes
import os
import pickle
from dataclasses import dataclass
from typing import Any

from rlflow.batch import Batch
from rlflow.runtime.objects.results import put_batch
from rlflow.runtime.objects.slices import open_message

# Parameters of mallopt, by their numbers in malloc.h, and bytes: blocks of up to 32 MiB come from the heap, and up to
# 256 MiB of free memory stay there.
_ALLOCATION = {-3: 32 << 20, -1: 256 << 20}


@dataclass(frozen=True)
class Pulse:
    """A sign of life of a process."""

    pid: int
    steps: int | None = None
    """A number that changes as long as the samples of a concurrent engine make progress; None for other processes."""


class ObjectProcess:
    """A worker process around one object. Its methods may be called concurrently."""

    def __init__(self) -> None:
        self._object: Any = None

    def pulse(self) -> Pulse:
        """Return a sign of life."""
        return Pulse(os.getpid())

    def reuse_memory(self) -> None:
        """Let the process reuse the memory that micro-batches are copied into.

        Allocating new memory takes longer than the copy. Other libraries than glibc have no such setting.
        """
        if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
            for parameter, value in _ALLOCATION.items():
                mallopt(parameter, value)

    def load_object(self, pickled: bytes) -> None:
        """Unpickle the object; comes before the first call.

        The object is neither an argument of the constructor nor are its arrays mapped: either would keep it in the
        store as long as this process lives.
        """
        self._object = pickle.loads(pickled)

    def call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*arguments, **named)

    def call_and_put(self, is_wanted: bool, method: str, /, *arguments: Any, **named: Any) -> Any:
        """Call a method of the object, and put the columns of a batch that it returns into the store of this host.

        A result that is not wanted is dropped. A SliceMessage arrives at the method as a batch of its rows. Raises what
        the method raises, and EngineError for uneven columns.
        """
        opened = {name: open_message(argument) for name, argument in named.items()}
        result = self.call(method, *map(open_message, arguments), **opened)
        if not is_wanted:
            return None
        return put_batch(result) if isinstance(result, Batch) else result
