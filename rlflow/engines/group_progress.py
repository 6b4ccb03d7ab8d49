"""The progress of a partial rollout: which responses of which groups are done, and what the others consist of so far.

A response is *finished* when it ended with an end token, and *done* when it is finished or has ``max_tokens`` tokens.
A conversation is done when no turn follows.
A group is *complete* when all of its responses are done.

Shapes: P prompts, G group size, R = P x G rollouts; rollout ``sample`` of ``prompt`` is row ``prompt * G + sample``.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rlflow.batch import Conversations, Packed, Prompts, Repeated, Rollouts
from rlflow.batch.routing import Routing
from rlflow.engines.base import Sampling
from rlflow.errors import EngineError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PartialResponse:
    """The tokens of a response that are generated so far, with one logprob and one policy version per token."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    conversation: bytes = b""
    """The rest of the conversation that they are (``Conversations.unfinished``); empty for other responses."""
    routing: Routing | None = None
    """The experts of tokens, at most from the first token of the prompt to the last but one of these."""


NO_RESPONSE = PartialResponse(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


def is_done(rollouts: Rollouts, sampling: Sampling) -> NDArray[np.bool_]:
    """Return [B]: True for each response that is finished or at a limit of ``sampling``."""
    if isinstance(rollouts, Conversations):
        return np.asarray(rollouts.unfinished.lengths == 0)
    done: NDArray[np.bool_] = rollouts.finished | (rollouts.response_ids.lengths >= sampling.max_tokens)
    return done


def prepend_partial(
    partial: Sequence[PartialResponse], ids: Packed, logprobs: Packed, versions: Packed
) -> tuple[Packed, Packed, Repeated]:
    """Put each row's partial response before its new tokens; return ids, logprobs and versions of the whole rows."""

    def prepend(name: str, column: Packed, dtype: DTypeLike) -> Packed:
        rows = (np.concatenate([getattr(before, name), column[row]]) for row, before in enumerate(partial))
        return Packed.from_rows(rows, dtype)

    token_versions = prepend("versions", versions, np.int32)
    return (
        prepend("ids", ids, np.int32),
        prepend("logprobs", logprobs, np.float32),
        Repeated.from_packed(token_versions),
    )


class GroupProgress:
    """The state of all rollouts of some prompts, whose keys are ascending."""

    def __init__(self, prompts: Prompts, sampling: Sampling, partial: Rollouts | None = None) -> None:
        """Start from ``partial``: rollouts generated so far, done or not, in the order of their keys."""
        self._group_size = sampling.group_size
        self._prompts = _prompt_numbers(prompts.keys)
        self.partial = partial
        num_rows = len(prompts) * self._group_size
        self.done = np.zeros(num_rows, np.bool_)
        """[R]: True for each response that is done; callers update it."""
        self.initial_lengths = np.zeros(num_rows, np.int64)
        """[R]: the number of response tokens in ``partial``."""
        self.partial_rows = np.full(num_rows, -1)
        """[R]: the row of each rollout in ``partial``, or -1."""
        if partial is not None:
            rows = self.rows_of(partial.keys)
            self.initial_lengths[rows] = partial.response_ids.lengths
            self.partial_rows[rows] = np.arange(len(rows))
            self.done[rows] = is_done(partial, sampling)

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Return [P]: True for each prompt whose group is complete."""
        return np.asarray(self.done.reshape(-1, self._group_size).all(1))

    def rows_of(self, keys: Ints) -> Ints:
        """Return the rows of the samples with these keys [n, 3]."""
        return np.searchsorted(self._prompts, _prompt_numbers(keys)) * self._group_size + keys[:, 2]

    def check(self, rollouts: Rollouts | None, rows: Collection[int], also: Collection[int] = ()) -> None:
        """Raise EngineError unless ``rollouts`` are those of ``rows``, each once, and maybe some of ``also``."""
        returned = [] if rollouts is None else self.rows_of(rollouts.keys).tolist()
        missing, unknown = set(rows).difference(returned), set(returned).difference(rows, also)
        if missing or unknown or len(returned) > len(set(returned)):
            raise EngineError(
                f"an engine has returned {len(returned)} rollouts for {len(rows)} samples: {len(missing)} are missing,"
                f" {len(returned) - len(set(returned))} are doubled, {len(unknown)} are of other samples."
            )

    def partial_responses(self, rows: Ints) -> list[PartialResponse]:
        """Return the partial response of each row; ``NO_RESPONSE`` for a row that has none."""
        return [NO_RESPONSE if row < 0 else self._partial_response(row) for row in self.partial_rows[rows].tolist()]

    def _partial_response(self, row: int) -> PartialResponse:
        assert self.partial is not None
        partial = self.partial
        unfinished = partial.unfinished[row].tobytes() if isinstance(partial, Conversations) else b""
        routing = None if partial.routing is None else partial.routing[row]
        columns = (partial.response_ids[row], partial.logprobs[row], partial.versions[row])
        return PartialResponse(*columns, unfinished, routing)

    def merge(self, parts: Sequence[Rollouts]) -> Rollouts | None:
        """Return ``partial`` with its samples replaced by those in ``parts``, in the order of keys; None if empty."""
        new = np.concatenate([np.zeros(0, np.int64), *(self.rows_of(part.keys) for part in parts)])
        unchanged = np.flatnonzero((self.partial_rows >= 0) & ~np.isin(np.arange(len(self.partial_rows)), new))
        if len(unchanged):
            assert self.partial is not None
            parts = [self.partial.take(self.partial_rows[unchanged]), *parts]
        if not parts:
            return None
        return Rollouts.concatenate(parts).take(np.argsort(np.concatenate([unchanged, new])))


def _prompt_numbers(keys: Ints) -> Ints:
    """Return one number per key, which identifies its step and prompt and sorts like them."""
    return (keys[:, 0] << 32) + keys[:, 1]
