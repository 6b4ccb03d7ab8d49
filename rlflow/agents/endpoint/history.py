"""The chats of an episode: messages or texts, each with the exact tokens that the engine has seen."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

Message = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Turn:
    """A call with its reply. It continues the tokens of its parent, or begins a segment."""

    parent: "Turn | None"
    context: bytes
    """The tokens of the prompt after those of the parent, int32."""
    reply: bytes
    finished: bool
    """It ended with an end token."""
    has_thoughts: bool = False
    """The model has thought in this segment."""

    @property
    def prompt_ids(self) -> list[int]:
        """Return the tokens of the prompt."""
        parts, turn = [self.context], self.parent
        while turn is not None:
            parts += [turn.reply, turn.context]
            turn = turn.parent
        return to_ids(b"".join(reversed(parts)))


class ChatHistory:
    """The turns of an episode by what was said up to their replies."""

    def __init__(self) -> None:
        self._turns: dict[bytes, Turn] = {}
        self._texts: dict[str, Turn] = {}
        self._num_messages = 0
        """The messages of the longest chat."""

    def add_chat(self, tools: Sequence[Any], messages: Sequence[Message], turn: Turn) -> None:
        """Record a turn whose reply is the last of the messages."""
        *_, digest = _digests(tools, messages)
        self._turns[digest] = turn
        self._num_messages = max(self._num_messages, len(messages))

    def find_chat(self, tools: Sequence[Any], messages: Sequence[Message]) -> tuple[int, Turn] | None:
        """Return the place of the last message that is a recorded reply after the same messages, and its turn."""
        if not self._turns:
            return None
        digests = list(_digests(tools, messages))
        places = (place for place in reversed(range(len(digests))) if messages[place]["role"] == "assistant")
        return next(((place, self._turns[digests[place]]) for place in places if digests[place] in self._turns), None)

    def reason_of_new_segment(self, messages: Sequence[Message]) -> str | None:
        """Return why these messages continue no recorded turn; None for the first call of a chat."""
        if not self._turns or all(message["role"] != "assistant" for message in messages):
            return None
        return "compaction" if len(messages) < self._num_messages else "edited"

    def add_text(self, text: str, turn: Turn) -> None:
        """Record a turn of a completion, whose prompt and reply are ``text`` together."""
        self._texts[text] = turn

    def find_text(self, text: str) -> tuple[str, Turn] | None:
        """Return the longest recorded text that this one begins with, and its turn."""
        known = max((known for known in self._texts if text.startswith(known)), key=len, default=None)
        return None if known is None else (known, self._texts[known])


def _digests(tools: Sequence[Any], messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield a digest of the tools and the messages up to each message."""
    digest = blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
    for message in messages:
        digest.update(json.dumps(_essence(message), sort_keys=True).encode() + b"\n")
        yield digest.copy().digest()


def _essence(message: Message) -> list[Any]:
    """Return what counts of a message. Clients drop thoughts from replies, and strip them."""
    if message["role"] != "assistant":
        return [message["role"], message["content"], message.get("tool_call_id")]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return ["assistant", message["content"].strip(), [[call["name"], call["arguments"]] for call in functions]]


def to_ids(tokens: bytes) -> list[int]:
    """Return int32 tokens as numbers."""
    ids: list[int] = np.frombuffer(tokens, np.int32).tolist()
    return ids


def to_bytes(ids: Sequence[int]) -> bytes:
    """Return tokens as int32."""
    return np.array(ids, np.int32).tobytes()
