"""The routes of the endpoint, and who may use them."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from rlflow.agents.endpoint import anthropic_form, openai_form
from rlflow.agents.endpoint.episodes import EndpointEpisode, Episodes
from rlflow.agents.endpoint.errors import ApiError
from rlflow.agents.endpoint.fields import check, read_ids
from rlflow.agents.endpoint.history import to_ids
from rlflow.agents.endpoint.service import Answer, Service
from rlflow.errors import first_line

_MAX_BODY = 32 * 2**20
# A worker may call before the engine's message about its episode arrives.
_GRACE_S = 1.0
_ANTHROPIC = "/v1/messages"
# Types of errors that Anthropic's clients know.
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The web application of an endpoint."""

    def __init__(self, service: Service, episodes: Episodes) -> None:
        self._service = service
        self._episodes = episodes
        self._model = service.model.name
        self.app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard])
        self.app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.put("/rlflow/name", self._set_name),
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._chat),
                web.post(_ANTHROPIC, self._messages),
                web.post(f"{_ANTHROPIC}/count_tokens", self._count_tokens),
            ]
        )

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests of strangers, and answer errors in the form of the route."""
        try:
            host = request.headers.get("Host", "").rpartition(":")[0] or request.host
            if host not in ("127.0.0.1", "localhost", "[::1]") or "Origin" in request.headers:
                raise ApiError("only programs on this host are answered", 403)
            if "Content-Encoding" in request.headers:
                raise ApiError("a compressed body is not read", 415)
            request["episode"] = await self._find_episode(request)
            return await handler(request)
        except ApiError as error:
            return _refuse(request, error)
        except web.HTTPException as error:
            return _refuse(request, ApiError(error.reason, error.status))
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # whatever it is, a client learns nothing of it
            print(f"{request.method} {request.path}: {first_line(error)}", file=sys.stderr)
            return _refuse(request, ApiError("the endpoint failed", 500))

    async def _find_episode(self, request: web.Request) -> EndpointEpisode | None:
        """Return the episode of a request, which the engine may not have announced yet. Raises ApiError."""
        deadline = time.monotonic() + _GRACE_S
        while True:
            try:
                return self._episodes.find(request.headers)
            except ApiError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rlflow"}
        model["max_model_len"] = self._service.model.max_tokens
        return web.json_response({"object": "list", "data": [model]})

    async def _set_name(self, request: web.Request) -> web.Response:
        self._episodes.set_name(_episode(request), (await _read(request)).get("name"))
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await _read(request)
        ids = read_ids(body.get("token_ids"), self._service.format.num_tokens)
        parameters = body.get("sampling_params") or {}
        check(isinstance(parameters, dict), "'sampling_params' must be an object")
        options = openai_form.read_options(parameters)
        answer = await self._service.answer_ids(_episode(request), ids, options, request.headers)
        return web.json_response(openai_form.write_ids(answer))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await _read(request)
        options, prompt, episode = openai_form.read_options(body), body.get("prompt"), _episode(request)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            answer = await self._service.answer_text(episode, prompt, options, request.headers)
        else:
            ids = read_ids(prompt, self._service.format.num_tokens)
            answer = await self._service.answer_ids_as_text(episode, ids, options, request.headers)
        written = openai_form.write_text(answer, self._model, self._logprobs(answer) if options.logprobs else None)
        if not options.stream:
            return web.json_response(written)
        usage = written.pop("usage")
        last = [{**written, "choices": [], "usage": usage}] if options.include_usage else []
        return await _stream(request, [written, *last, None])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        chat = openai_form.read_chat(await _read(request))
        answer = await self._service.answer_chat(_episode(request), chat, request.headers)
        logprobs = self._logprobs(answer) if chat.options.logprobs else None
        if not chat.options.stream:
            return web.json_response(openai_form.write_chat(answer, self._model, logprobs))
        chunks = openai_form.stream_chat(answer, self._model, logprobs, chat.options.include_usage)
        return await _stream(request, [*chunks, None])

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        chat = anthropic_form.read_messages(await _read(request))
        answer = await self._service.answer_chat(_episode(request), chat, request.headers)
        if not chat.options.stream:
            return web.json_response(anthropic_form.write_messages(answer, self._model))
        return await _stream(request, anthropic_form.stream_messages(answer, self._model))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        chat = anthropic_form.read_messages(await _read(request))
        return web.json_response({"input_tokens": self._service.count_tokens(chat)})

    def _logprobs(self, answer: Answer) -> list[dict[str, Any]]:
        texts = [self._service.format.decode([token]) for token in to_ids(answer.reply.ids)]
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, openai_form.to_logprobs(answer), strict=True)
        ]


def _episode(request: web.Request) -> EndpointEpisode:
    """Return the episode of a request. Raises ApiError if a worker's key came without a name."""
    episode: EndpointEpisode | None = request["episode"]
    if episode is None:
        raise ApiError("a worker's key needs the name of an episode in X-Session-ID", 401, "invalid_api_key")
    return episode


async def _read(request: web.Request) -> dict[str, Any]:
    """Return the body of a request, an object. Raises ApiError."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise ApiError("the body is not valid JSON") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be an object")
    return body


async def _stream(request: web.Request, events: Iterable[dict[str, Any] | None]) -> web.StreamResponse:
    """Answer with server-sent events; None is OpenAI's last one."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        name = f"event: {event['type']}\n" if event and "type" in event else ""
        await response.write(f"{name}data: {json.dumps(event) if event else '[DONE]'}\n\n".encode())
    await response.write_eof()
    return response


def _refuse(request: web.Request, error: ApiError) -> web.Response:
    is_anthropic = request.path.startswith(_ANTHROPIC)
    kind = _TYPES.get(error.status, "invalid_request_error") if error.status < 500 else "api_error"
    detail = {"message": str(error), "type": kind, "code": error.code}
    body = {"type": "error", "error": detail} if is_anthropic else {"error": {**detail, "param": None}}
    return web.json_response(body, status=error.status)
