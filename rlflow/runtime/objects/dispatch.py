"""Parts of a batch on their way to workers: the batch travels once, and each worker's rows beside it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlflow.batch import Batch
from rlflow.packed import Compact, Rows, compact, expanded
from rlflow.runtime.objects.slices import near
from rlflow.runtime.objects.store import fetch, here
from rlflow.runtime.ray.cluster.hosts import quiet_ray


@dataclass(frozen=True, eq=False)
class Whole:
    """A batch of which several workers get parts."""

    batch: Batch

    def part(self, rows: Rows) -> "Part":
        return Part(self, rows)

    @cached_property
    def reference(self) -> Any:
        """To a copy of it in the store."""
        return quiet_ray().put(self.batch)


@dataclass(frozen=True, eq=False)
class Part:
    """These rows of a batch."""

    whole: Whole
    rows: Rows

    @property
    def batch(self) -> Batch:
        return self.whole.batch.take(self.rows)

    def sent(self) -> "SentPart":
        return SentPart([self.whole.reference], compact(self.rows.astype(np.int64)))


@dataclass(frozen=True)
class SentPart:
    reference: list[Any]
    """One: in a list Ray hands it on as it is."""
    rows: Compact


def opened(argument: Any) -> Any:
    """The rows of a sent part, as a batch to be read on this host; all else as it is."""
    if not isinstance(argument, SentPart):
        return argument
    whole: Batch = fetch(argument.reference[0])
    return near(whole.take(expanded(argument.rows)), here())
