"""The interface of agents: programs that call a model as often as they like, and say what came of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from rlflow.rewards.base import MAX_FLOAT32, Row
from rlflow.schema import Section

if TYPE_CHECKING:
    from aiohttp import ClientSession

LIMIT_CODES = {"context": "context_length_exceeded", "calls": "rlflow_limit_reached", "ended": "rlflow_limit_reached"}
"""The code of the answer to a call that is refused, by the reason."""

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


class Client:
    """The model, as one episode sees it. Other libraries reach it with ``base_url`` and ``api_key``."""

    def __init__(self, service: ModelService, api_key: str, seed: int, http: "ClientSession") -> None:
        """Use the connections of ``http``."""
        self._url, self._turn_tokens, self._http = service.url, service.model.turn_tokens, http
        self._last_reply = ""
        self.base_url = f"{service.url}/v1"
        """The address for OpenAI's clients."""
        self.api_key = api_key
        self.model = service.model.name
        """The model's name for requests."""
        self.seed = seed
        """A number that follows from the run's seed and the sample, the same in each attempt."""
        self.random = Random(seed)
        """Random numbers from this seed."""
        self.call_rewards: dict[str, float] = {}
        """The rewards given so far, by the ids of the replies."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> ChatReply:
        """Return the model's reply. ``tools`` are functions in OpenAI's form. Raises LimitReachedError."""
        options = {"tools": list(tools), "stop": list(stop), "max_tokens": max_tokens}
        body = {"messages": list(messages), **{name: value for name, value in options.items() if value}}
        answer = await self._post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        message = {name: value for name, value in choice["message"].items() if value is not None}
        return ChatReply(answer["id"], message, choice["finish_reason"] != "length")

    async def generate(self, ids: Sequence[int], *, max_tokens: int | None = None) -> TokenReply:
        """Return the model's reply to tokens. Raises LimitReachedError."""
        parameters = {"max_tokens": self._turn_tokens if max_tokens is None else max_tokens}
        body = {"token_ids": list(ids), "sampling_params": parameters}
        answer = await self._post("/inference/v1/generate", body)
        choice = answer["choices"][0]
        return TokenReply(answer["request_id"], choice["token_ids"], choice["finish_reason"] != "length")

    def give_reward(self, reward: float) -> None:
        """Add a reward to the last call. Raises ValueError for one that cannot be stored."""
        total = self.call_rewards.get(self._last_reply, 0.0) + float(reward)
        if not abs(total) <= MAX_FLOAT32:
            raise ValueError(f"{reward} is no reward")
        self.call_rewards[self._last_reply] = total

    async def set_name(self, name: str) -> None:
        """Have requests with the worker's key and this ``X-Session-ID`` count as this episode's."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        async with self._http.put(f"{self._url}/rlflow/name", json={"name": name}, headers=headers) as response:
            response.raise_for_status()

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        async with self._http.post(self._url + path, json={"model": self.model, **body}, headers=headers) as response:
            answer = await response.json()
        if response.status != 200:
            error = answer.get("error", {})
            is_limit = error.get("code") in LIMIT_CODES.values()
            raise (LimitReachedError if is_limit else ValueError)(error.get("message", f"status {response.status}"))
        self._last_reply = answer.get("id") or answer["request_id"]
        return answer


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
