"""The messages between the processes of agents: an engine's, its endpoint's, and those that agents run in.

All three run on one host and trust each other. Tokens and logprobs travel between engine and endpoint alone, as bytes.
The first frame to an endpoint has its ModelSpec, and the first one to a worker of agents has its ModelService.
"""

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Literal

from rlflow.agents.base import Outcome
from rlflow.rewards.base import Failure, Row

if TYPE_CHECKING:
    from asyncio import StreamReader

LENGTH = struct.Struct("<I")
"""A frame is its length in bytes, and a pickled list of messages."""


@dataclass(frozen=True)
class OpenEpisode:
    """Engine to endpoint: accept the calls of an episode."""

    episode: str
    token: str
    """The bearer token of this episode alone."""
    worker_token: str
    """The bearer token of the worker of agents that runs it (``ModelService.key``)."""


@dataclass(frozen=True)
class CloseEpisode:
    """Engine to endpoint: refuse further calls of an episode, and forget it."""

    episode: str


@dataclass(frozen=True)
class Call:
    """Endpoint to engine: a prompt that wants a reply."""

    number: int
    """The number of the call at this endpoint."""
    episode: str
    prompt_ids: bytes
    """Tokens, int32."""
    max_tokens: int
    """The limit of the reply, within those of the recipe."""
    is_repeated: bool = False
    """The client says that it has asked this before and got no answer: it gets the answer that it should have had."""


@dataclass(frozen=True)
class CancelCall:
    """Endpoint to engine: the client has gone away."""

    number: int


@dataclass(frozen=True)
class Count:
    """Endpoint to engine: something of an episode that is counted, such as a segment that had to be rendered anew."""

    episode: str
    name: str
    value: float = 1.0


@dataclass(frozen=True)
class Ping:
    """Engine to endpoint: show that you live. Endpoint to engine: it does."""


@dataclass(frozen=True)
class Reply:
    """Engine to endpoint: the answer to a call."""

    number: int
    ids: bytes
    """Tokens, int32, with the end token if it was sampled."""
    logprobs: bytes
    """The logprob of each token, float32."""
    finished: bool
    """False where the reply was cut at its limit."""


@dataclass(frozen=True)
class Refusal:
    """Engine to endpoint: a call that gets no answer."""

    number: int
    reason: Literal["calls", "ended"]
    """The limit of calls of an episode, or its end. Prompts that are too long are refused by the endpoint."""
    text: str


@dataclass(frozen=True)
class StartEpisode:
    """Engine to worker: run an episode."""

    episode: str
    token: str
    row: Row
    seed: int
    """The seed for what an environment draws, the same in each attempt."""


@dataclass(frozen=True)
class StopEpisode:
    """Engine to worker: cancel an episode, whose outcome nobody needs."""

    episode: str


@dataclass(frozen=True)
class EpisodeEnded:
    """Worker to engine: the outcome of an episode, or why there is none."""

    episode: str
    outcome: Outcome | Failure
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards of single calls, by the ids of their replies."""


def pack(messages: Sequence[Any]) -> bytes:
    """Return messages as a frame."""
    content = pickle.dumps(list(messages), pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(content)) + content


def read_messages(file: IO[bytes]) -> list[Any]:
    """Return the messages of the next frame. Raises EOFError at the end, also if it is in the middle of a frame."""
    try:
        (size,) = LENGTH.unpack(file.read(LENGTH.size))
        messages: list[Any] = pickle.loads(file.read(size))
    except (OSError, ValueError, struct.error, pickle.UnpicklingError) as error:
        raise EOFError from error
    return messages


async def receive_messages(reader: "StreamReader") -> list[Any]:
    """Return the messages of the next frame. Raises EOFError as ``read_messages`` does."""
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        messages: list[Any] = pickle.loads(await reader.readexactly(size))
    except ConnectionError as error:
        raise EOFError from error
    return messages
