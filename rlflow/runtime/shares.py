"""Which rows of a batch go to which rank."""

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Sequences

Index = NDArray[np.int64]


def shares(sequences: Sequences, count: int) -> list[Index]:
    """``count`` sets of rows, each in the order of the batch, with nearly equal tokens.

    The rollouts of a prompt stay together where there are prompts enough, since their rank reads the prompt once. The
    longest go first, each to the share with the fewest tokens so far (Graham 1969, LPT).
    """
    tokens = sequences.prompt_ids.lengths + sequences.response_ids.lengths
    prompts = np.unique(sequences.keys[:, :2], axis=0, return_inverse=True)[1].ravel()
    units = prompts if len(np.unique(prompts)) >= count else np.arange(len(sequences))
    sizes = np.bincount(units, weights=tokens)
    loads, owners = np.zeros(count), np.empty(len(sizes), np.int64)
    for unit in np.argsort(-sizes, kind="stable"):
        owners[unit] = loads.argmin()
        loads[owners[unit]] += sizes[unit]
    return [np.flatnonzero(owners[units] == share) for share in range(count)]
