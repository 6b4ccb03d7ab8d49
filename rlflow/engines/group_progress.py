"""How far the groups of some prompts are written, where writing ends before all of them are whole.

Shapes: P prompts, G group, R = P x G samples; row ``prompt * G + sample``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rlflow.batch import Packed, Prompts, Repeated, Rollouts
from rlflow.engines.base import Sampling

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Begun:
    """What is written of a response so far, [T] each."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


NOTHING = Begun(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


def continued(
    before: Sequence[Begun], ids: Packed, logprobs: Packed, versions: Packed
) -> tuple[Packed, Packed, Repeated]:
    """The columns of responses of which some were begun ``before``."""

    def joined(name: str, column: Packed, dtype: DTypeLike) -> Packed:
        rows = (np.concatenate([getattr(begun, name), column[row]]) for row, begun in enumerate(before))
        return Packed.from_rows(rows, dtype)

    of_tokens = joined("versions", versions, np.int32)
    return joined("ids", ids, np.int32), joined("logprobs", logprobs, np.float32), Repeated.of(of_tokens)


def is_done(rollouts: Rollouts, sampling: Sampling) -> NDArray[np.bool_]:
    """For each whether it has ended, or is as long as allowed."""
    done: NDArray[np.bool_] = rollouts.finished | (rollouts.response_ids.lengths >= sampling.max_tokens)
    return done


class Groups:
    """Prompts are in the order of their keys. Of a sample that is not begun there is no rollout."""

    def __init__(self, prompts: Prompts, sampling: Sampling, begun: Rollouts | None = None) -> None:
        """``begun``: what is written of some samples so far, all of it or not, in the order of keys."""
        self._size = sampling.group_size
        self._prompts = _numbers(prompts.keys)
        self.begun = begun
        count = len(prompts) * self._size
        self.done = np.zeros(count, np.bool_)
        """[R]: those that have ended, or are as long as allowed."""
        self.written = np.zeros(count, np.int64)
        """[R]: tokens that were written of each when this was made."""
        self.place = np.full(count, -1)
        """[R]: of each in ``begun``, or -1."""
        if begun is not None:
            rows = self.rows_of(begun.keys)
            self.written[rows] = begun.response_ids.lengths
            self.place[rows] = np.arange(len(rows))
            self.done[rows] = is_done(begun, sampling)

    def rows_of(self, keys: Ints) -> Ints:
        """The rows of samples, whose keys are [n, 3]."""
        return np.searchsorted(self._prompts, _numbers(keys)) * self._size + keys[:, 2]

    def begun_of(self, rows: Ints) -> list[Begun]:
        """Of a sample that is not begun, nothing."""
        return [NOTHING if place < 0 else self._begun_at(place) for place in self.place[rows].tolist()]

    def _begun_at(self, place: int) -> Begun:
        assert self.begun is not None
        return Begun(self.begun.response_ids[place], self.begun.logprobs[place], self.begun.versions[place])

    @property
    def whole(self) -> NDArray[np.bool_]:
        """[P]: whether all samples of a prompt are done."""
        return np.asarray(self.done.reshape(-1, self._size).all(1))

    @property
    def num_whole(self) -> int:
        return int(self.whole.sum())

    def joined(self, parts: Sequence[Rollouts]) -> Rollouts | None:
        """``begun``, in which ``parts`` stand in the places of the same samples; in the order of keys. None of none."""
        new = np.concatenate([np.zeros(0, np.int64), *(self.rows_of(part.keys) for part in parts)])
        kept = np.flatnonzero((self.place >= 0) & ~np.isin(np.arange(len(self.place)), new))
        if len(kept):
            assert self.begun is not None
            parts = [self.begun.take(self.place[kept]), *parts]
        if not parts:
            return None
        return Rollouts.joined(parts).take(np.argsort(np.concatenate([kept, new])))


def _numbers(keys: Ints) -> Ints:
    """One for each prompt, in their order."""
    return (keys[:, 0] << 32) + keys[:, 1]
