"""Prompts with a chosen and a rejected response."""

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Pairs


def pairs_of(keys: NDArray[np.int64], prompt_ids: Packed, chosen_ids: Packed, rejected_ids: Packed) -> Pairs:
    """From a row of each a pair: ``keys`` [P, 3] are those of the prompts."""
    both = np.repeat(np.arange(len(keys)), 2)
    pair_keys = keys[both]
    pair_keys[1::2, 2] = 1
    # Chosen ones first, which are then taken in turn with the others.
    turns = np.arange(2 * len(keys)).reshape(2, -1).T.ravel()
    return Pairs(
        keys=pair_keys,
        prompt_ids=prompt_ids.take(both),
        response_ids=Packed.joined([chosen_ids, rejected_ids]).take(turns),
    )
