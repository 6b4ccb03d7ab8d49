"""The interface of agents: programs that call a model as often as they like, and say what came of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

from rlflow.rewards.base import Row
from rlflow.schema import Section

Message = Mapping[str, Any]
"""A message of a chat in OpenAI's form: ``role``, ``content``, and maybe ``tool_calls`` or ``tool_call_id``."""


@dataclass(frozen=True)
class ModelSpec:
    """The model of an endpoint."""

    tokenizer: str
    """The folder with the tokenizer and its chat template."""
    name: str
    """The name by which requests call the model."""
    max_tokens: int
    """The limit of a prompt and its reply together."""
    turn_tokens: int
    """The limit of a reply."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""


@dataclass(frozen=True)
class ModelService:
    """The address of the model for the agents of a worker."""

    url: str
    """The endpoint's address, ``http://127.0.0.1:PORT``; OpenAI's clients want it with ``/v1``."""
    key: str
    """The bearer token for requests of any episode of this worker. They name it in ``X-Session-ID``."""
    model: ModelSpec


@dataclass(frozen=True)
class Outcome:
    """The worth of an episode."""

    reward: float = 0.0
    """The reward at its end."""
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """Further rewards of single calls, by the ids of their replies."""
    finished: bool = True
    """False where a limit of the recipe cut the episode."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers to report, the same names in each episode; ``tool_s`` are the seconds spent in tools."""


@dataclass(frozen=True)
class ChatReply:
    """A reply of the model to messages."""

    id: str
    message: Message
    """The message as the next call may send it back."""
    finished: bool
    """False where the reply was cut at its limit."""

    @property
    def text(self) -> str:
        """Return the text without thoughts and tool calls."""
        return str(self.message.get("content") or "")


@dataclass(frozen=True)
class TokenReply:
    """A reply of the model to tokens."""

    id: str
    ids: Sequence[int]
    finished: bool
    """False where the reply was cut at its limit."""


class LimitReachedError(Exception):
    """A call is refused because of a limit in the recipe. An agent that does not catch it ends as truncated."""


class WorkerBrokenError(Exception):
    """A worker process can run no more episodes: an agent raises it to have the process replaced."""


class Client(Protocol):
    """The model, as one episode sees it. Other libraries reach it with ``base_url`` and ``api_key``."""

    base_url: str
    """The address for OpenAI's clients, ``http://127.0.0.1:PORT/v1``."""
    api_key: str
    model: str
    """The model's name for requests."""
    seed: int
    """A number that follows from the run's seed and the sample, the same in each attempt."""
    random: Random
    """Random numbers from this seed."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> ChatReply:
        """Return the model's reply. ``tools`` are functions in OpenAI's form. Raises LimitReachedError."""

    async def generate(self, ids: Sequence[int], *, max_tokens: int | None = None) -> TokenReply:
        """Return the model's reply to tokens. Raises LimitReachedError."""

    def give_reward(self, reward: float) -> None:
        """Add a reward to the last call."""

    async def set_name(self, name: str) -> None:
        """Have requests with the worker's key and this ``X-Session-ID`` count as this episode's."""


@dataclass
class Agent(Section, ABC):
    """A program around a model. A worker process builds one, and runs many episodes with it at the same time.

    Derive a dataclass from it, whose fields are the recipe's ``options``. What it draws comes from ``client.random``.
    """

    gives_rewards: ClassVar[bool] = True
    """False if its reward is always 0, so that the reward function ``environment`` is refused."""
    call_cpu_s: ClassVar[float] = 2.5e-3
    """CPU time for each call, of the endpoint and of this agent, as plans expect it."""

    def prepare(self) -> None:
        """Import slow libraries; called once, before workers are forked."""

    async def open(self, service: ModelService) -> None:
        """Start what all episodes of this worker share."""

    @abstractmethod
    async def run(self, client: Client, row: Row) -> Outcome | float:
        """Run one episode about a row of the data set, and return what it was worth."""

    async def close(self) -> None:
        """End what ``open`` has started."""
