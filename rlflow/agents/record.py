"""The record of an episode: what the model was asked, and what it sampled.

A call has a *name*: a digest of its prompt and its limit, and how often the episode has asked just that before. Its
random numbers follow from the run's seed, the sample and the name. So they do not depend on the order in which calls
arrive, and an agent that starts again is answered from the record as long as it asks the same.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from rlflow.agents.call_generator import CallResult
from rlflow.batch.routing import split_routing
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse

_NOT_BEGUN = CallResult(NO_RESPONSE, finished=False, is_done=False, text="")

CallName = tuple[str, int]
"""A digest of the prompt and the limit, and the number of earlier calls with the same."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call of the model, with what is sampled so far."""

    result: CallResult = _NOT_BEGUN
    prompt_ids: NDArray[np.int32] | None = None
    """None for a call of a record that an engine took over, until the agent asks again."""
    limit: int = 0
    """The limit of the reply in tokens."""
    asked_at: float = 0.0
    """The time at which this attempt has asked."""
    wait_s: float = 0.0
    """The time in which the agent waited for no reply before."""
    reply_s: float = 0.0
    """The time until the reply was there; 0 for one of the record."""

    @property
    def ids(self) -> NDArray[np.int32]:
        """Return the sampled tokens."""
        return self.result.reply.ids


@dataclass(eq=False)
class EpisodeRecord:
    """The calls of an episode, in the order in which they were first asked."""

    calls: dict[CallName, RecordedCall] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    """How often this attempt has asked each prompt."""
    used: dict[CallName, None] = field(default_factory=dict)
    """The calls of this attempt."""

    def begin_attempt(self) -> None:
        """Start from a fresh environment. The calls stay, for those that it makes again."""
        self.asked, self.used = Counter(), {}

    def name_of(self, prompt_ids: bytes, max_tokens: int, is_repeated: bool) -> CallName:
        """Return the name of a call. A repeated one is that which was asked last."""
        digest = blake2b(prompt_ids, digest_size=12, key=max_tokens.to_bytes(8, "little")).hexdigest()
        if not (is_repeated and self.asked[digest]):
            self.asked[digest] += 1
        return digest, self.asked[digest] - 1

    def copy(self) -> "EpisodeRecord":
        """Return a record that stays as this one is now."""
        return EpisodeRecord(dict(self.calls), Counter(self.asked), dict(self.used))

    def done_calls(self) -> Iterator[RecordedCall]:
        """Yield the calls of this attempt that are done, in the order in which they were first asked."""
        return (call for name, call in self.calls.items() if name in self.used and call.result.is_done)

    def num_routed(self, prompt_ids: NDArray[np.int32]) -> int:
        """Return of how many tokens of a prompt the experts are known, from the longest call that it continues."""
        prompt = prompt_ids.tobytes()
        sequences = (
            np.concatenate([call.prompt_ids, call.ids])
            for call in self.done_calls()
            if call.result.reply.routing is not None and call.prompt_ids is not None
        )
        return max((len(ids) - 1 for ids in sequences if prompt.startswith(ids.tobytes())), default=0)

    @property
    def length(self) -> int:
        """Return the number of sampled tokens in this attempt."""
        return sum(len(self.calls[name].ids) for name in self.used)

    def to_bytes(self) -> bytes:
        """Return what ``from_partial`` needs besides the tokens of all calls, as JSON.

        Those of earlier attempts are among them: this attempt may have to ask them again.
        """
        calls = [
            [*name, len(call.ids), _num_records(call), call.result.finished, call.result.is_done, call.result.text]
            for name, call in self.calls.items()
        ]
        return json.dumps({"calls": calls}).encode()

    @staticmethod
    def from_partial(partial: PartialResponse) -> "EpisodeRecord":
        """Return the record of an episode that an engine was interrupted in, or a new one."""
        record = EpisodeRecord()
        if not partial.conversation:
            return record
        calls = json.loads(partial.conversation)["calls"]
        ends = np.cumsum([length for _, _, length, *_ in calls], dtype=np.int64)
        columns = (np.split(column, ends)[:-1] for column in (partial.ids, partial.logprobs, partial.versions))
        routing = split_routing(partial.routing, [num_records for _, _, _, num_records, *_ in calls])[:-1]
        replies = zip(*columns, strict=True)
        for (digest, number, _, _, finished, is_done, text), records, reply in zip(
            calls, routing, replies, strict=True
        ):
            result = CallResult(replace(PartialResponse(*reply), routing=records), finished, is_done, text)
            record.calls[digest, number] = RecordedCall(result)
        return record


def _num_records(call: RecordedCall) -> int:
    return 0 if call.result.reply.routing is None else len(call.result.reply.routing)


def call_key(sample_key: NDArray[np.int64], name: CallName) -> NDArray[np.int64]:
    """Return the key of a call, [3], from which its random numbers follow: step, a hash, 0."""
    digest = blake2b(sample_key.tobytes() + f"{name[0]}:{name[1]}".encode(), digest_size=8).digest()
    return np.array([sample_key[0], int.from_bytes(digest, "little") >> 2, 0], np.int64)
