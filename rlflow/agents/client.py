"""The model as an episode sees it, over HTTP."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import aiohttp

from rlflow.agents.base import ChatReply, LimitReachedError, Message, ModelService, Outcome, TokenReply
from rlflow.agents.messages import StartEpisode

_LIMITS = frozenset({"context_length_exceeded", "rlflow_limit_reached"})


class HttpClient:
    """The client of one episode (``base.Client``)."""

    def __init__(self, service: ModelService, episode: StartEpisode, http: aiohttp.ClientSession) -> None:
        """Use the connections of ``http``."""
        self._service, self._http = service, http
        self._headers = {"Authorization": f"Bearer {episode.token}"}
        self.base_url, self.api_key, self.model = f"{service.url}/v1", episode.token, service.model.name
        self.seed, self.random = episode.seed, Random(episode.seed)
        self._last_reply = ""
        self._call_rewards: dict[str, float] = {}
        self._is_refused = False

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> ChatReply:
        """Return the model's reply. Raises LimitReachedError."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        body |= {"tools": list(tools)} if tools else {}
        body |= {"stop": list(stop)} if stop else {}
        body |= {"max_tokens": max_tokens} if max_tokens else {}
        answer = await self._post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        message = {name: value for name, value in choice["message"].items() if value is not None}
        return ChatReply(answer["id"], message, choice["finish_reason"] != "length")

    async def generate(self, ids: Sequence[int], *, max_tokens: int | None = None) -> TokenReply:
        """Return the model's reply to tokens. Raises LimitReachedError."""
        limit = self._service.model.turn_tokens if max_tokens is None else max_tokens
        body = {"model": self.model, "token_ids": list(ids), "sampling_params": {"max_tokens": limit}}
        answer = await self._post("/inference/v1/generate", body)
        choice = answer["choices"][0]
        return TokenReply(answer["request_id"], choice["token_ids"], choice["finish_reason"] != "length")

    def give_reward(self, reward: float) -> None:
        """Add a reward to the last call."""
        self._call_rewards[self._last_reply] = self._call_rewards.get(self._last_reply, 0.0) + float(reward)

    async def set_name(self, name: str) -> None:
        """Have requests with the worker's key and this ``X-Session-ID`` count as this episode's."""
        async with self._http.put(
            f"{self._service.url}/rlflow/name", json={"name": name}, headers=self._headers
        ) as response:
            response.raise_for_status()

    def outcome(self, result: Outcome | float, finished: bool = True) -> Outcome:
        """Return what the episode was worth, with the rewards given before its end."""
        whole = result if isinstance(result, Outcome) else Outcome(float(result))
        return Outcome(
            float(whole.reward),
            {**self._call_rewards, **whole.call_rewards},
            finished and whole.finished and not self._is_refused,
            dict(whole.metrics),
        )

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        async with self._http.post(self._service.url + path, json=body, headers=self._headers) as response:
            answer = await response.json()
        if response.status != 200:
            error = answer.get("error", {})
            if error.get("code") in _LIMITS:
                self._is_refused = True
                raise LimitReachedError(error.get("message", ""))
            raise ValueError(error.get("message", f"the endpoint answers {response.status}"))
        self._last_reply = answer.get("id") or answer["request_id"]
        return answer
