"""The likeliest words of a model in the place of each response token, as a packed column of records.

A record holds the numbers of K words, int32, and then their logprobs, float32.

Shapes: B rollouts, T response tokens, K words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch.packed import Packed
from rlflow.batch.rows import Batch


@dataclass(frozen=True, eq=False, kw_only=True)
class TopLogprobs(Batch):
    """The likeliest words of a model in the place of each response token, with their logprobs."""

    values: Packed
    """B rows of records, one for each response token. Those of rows that are not scored mean nothing."""
    is_scored: NDArray[np.bool_]
    """[B]: False for responses that the model has not read."""


def to_records(words_and_logprobs: NDArray[np.float32]) -> NDArray[np.void]:
    """Return records [T] from [T, 2 K]: numbers of words, and then their logprobs."""
    size = words_and_logprobs.shape[1] // 2
    words = words_and_logprobs[:, :size].astype(np.int32).view(np.float32)
    fields = np.ascontiguousarray(np.concatenate([words, words_and_logprobs[:, size:]], axis=1))
    return fields.view(f"V{8 * size}")[:, 0]


def find_words(columns: Mapping[str, Packed]) -> NDArray[np.int32] | None:
    """Return the numbers of words [T, K] in a column of records; None if there is no such column."""
    records = next((column.values for column in columns.values() if column.values.dtype.kind == "V"), None)
    if records is None:
        return None
    numbers: NDArray[np.int32] = np.ascontiguousarray(records).view(np.int32).reshape(len(records), -1)
    return numbers[:, : numbers.shape[1] // 2]


def loss_values(values: NDArray[Any]) -> NDArray[Any]:
    """Return what a loss reads of a column: the logprobs [T, K] of records, or other values as they are."""
    if values.dtype.kind != "V":
        return values
    numbers: NDArray[np.float32] = np.ascontiguousarray(values).view(np.float32).reshape(len(values), -1)
    return numbers[:, numbers.shape[1] // 2 :]
