"""Requests that must be refused, and must hurt nobody."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from rlflow.agents.messages import CloseEpisode
from tests.unit.agents.endpoint.conftest import ScriptedEngine, ids_of, post, wait_for, words

pytestmark = pytest.mark.slow  # the endpoint takes some seconds to start

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/messages/count_tokens": CHAT,
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}},
}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_keys_open_only_their_own_episodes(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, token), (_, other) = engine.open("worker-a"), engine.open("worker-b")
    assert post(engine, "/rlflow/name", {"name": "trace"}, bearer(token), "PUT")[0] == 200
    refused = [{}, bearer(""), bearer("wrong"), {"x-api-key": "wrong"}, bearer(first), {"Authorization": token}]
    # A worker's key needs the name of one of its own episodes, and nobody else may use or take it.
    refused += [bearer("worker-a"), bearer("worker-b") | {"X-Session-ID": "trace"}]
    refused += [bearer("worker-a") | {"X-Session-ID": first}]
    with ThreadPoolExecutor(len(refused)) as threads:
        answers = list(threads.map(lambda headers: post(engine, "/v1/chat/completions", CHAT, headers), refused))
        assert list(threads.map(lambda headers: post(engine, "/v1/models", None, headers)[0], refused[:4])) == [401] * 4
    assert [(status, answer["error"]["code"]) for status, answer in answers] == [(401, "invalid_api_key")] * len(
        refused
    )
    assert engine.calls == []
    for headers in (bearer(token), {"x-api-key": token}, bearer("worker-a") | {"X-Session-ID": "trace"}):
        assert post(engine, "/v1/chat/completions", CHAT, headers)[0] == 200
    assert {call.episode for call in engine.calls} == {first}
    assert post(engine, "/v1/chat/completions", CHAT, bearer(other))[0] == 200
    again = engine.open("worker-a")
    assert post(engine, "/rlflow/name", {"name": "trace"}, bearer(again[1]), "PUT")[0] == 409
    engine.endpoint.send([CloseEpisode(first)])
    wait_for(lambda: post(engine, "/v1/chat/completions", CHAT, bearer(token))[0] == 401)
    assert post(engine, "/v1/chat/completions", CHAT, bearer("worker-a") | {"X-Session-ID": "trace"})[0] == 401
    assert post(engine, "/rlflow/name", {"name": "trace"}, bearer(again[1]), "PUT")[0] == 200


def test_an_episode_that_ends_refuses_its_open_calls(engine: ScriptedEngine) -> None:
    episode, token = engine.open()

    def end(call: Any) -> None:
        engine.endpoint.send([CloseEpisode(episode)])

    engine.answer = end
    status, answer = post(engine, "/v1/chat/completions", CHAT, bearer(token))
    assert (status, answer["error"]["code"]) == (400, "rlflow_limit_reached")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "http://127.0.0.1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Host": "localhost:1"}, 200),
    ],
)
def test_browsers_and_foreign_hosts_are_refused(engine: ScriptedEngine, headers: dict[str, str], status: int) -> None:
    _, token = engine.open()
    assert post(engine, "/v1/chat/completions", CHAT, bearer(token) | headers)[0] == status


def test_a_body_is_no_larger_than_32_mib(engine: ScriptedEngine) -> None:
    """An endpoint that knows the size does not read it, and the error has the form of the route."""
    _, token = engine.open()
    large = b'{"messages": "' + b"x" * 2**25 + b'"}'
    status, answer = post(engine, "/v1/messages", large, bearer(token))
    assert (status, answer["type"], answer["error"]["type"]) == (413, "error", "request_too_large")


def test_an_empty_prompt_is_refused(engine: ScriptedEngine) -> None:
    _, token = engine.open()
    prompts: list[Any] = ["", [], [265], [-1], ["a", "b"]]
    for prompt in prompts:
        assert post(engine, "/v1/completions", {"prompt": prompt}, bearer(token))[0] == 400
    assert engine.calls == []


def test_unknown_routes_and_methods_are_errors_in_json(engine: ScriptedEngine) -> None:
    _, token = engine.open()
    assert post(engine, "/v1/embeddings", {}, bearer(token))[0] == 404
    assert post(engine, "/v1/models", {}, bearer(token))[0] == 405


def malformed(random: Random, value: Any) -> Any:
    """Return a value with one part replaced by something else."""
    if isinstance(value, dict | list) and value and random.random() < 0.8:
        key = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        copy[key] = malformed(random, value[key])
        return copy
    texts = ["", "x", "\ud800", "\0", "system", "<|im_end|>"]
    numbers = [-1, 0, 1, 2.5, 1e308, 10**30, 265, float("nan"), True]
    return random.choice([None, [], {}, [[]], [{}], {"type": "text"}, [1] * 9, *texts, *numbers])


RICH = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "4"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "max_tokens": 9,
    "stop": ["x"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "logprobs": False,
}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "4"}]}
RICH_MESSAGES = {
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, USE]},
        {"role": "user", "content": [RESULT]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "max_tokens": 9,
    "stop_sequences": ["x"],
}


def test_3000_malformed_bodies_hurt_nobody(engine: ScriptedEngine) -> None:
    _, token = engine.open()
    random = Random(0)
    routes = [*ROUTES.items(), ("/v1/chat/completions", RICH), ("/v1/messages", RICH_MESSAGES)]
    statuses: dict[int, int] = {}
    for number in range(3000):
        path, body = random.choice(routes)
        content = json.dumps(malformed(random, body)).encode()
        if number % 10 == 0:
            place = random.randrange(len(content))
            content = content[:place] + random.randbytes(random.randrange(9)) + content[place + 1 :]
        status, answer = post(engine, path, content, bearer(token))
        assert status in (200, 400), (path, content, answer)
        assert status == 200 or answer["error"]["message"]
        statuses[status] = statuses.get(status, 0) + 1
    assert statuses[400] > 1000
    assert all(0 <= token < 265 for call in engine.calls for token in ids_of(call.prompt_ids))
    assert all(1 <= call.max_tokens <= 256 for call in engine.calls)
    assert engine.deaths == []


@pytest.mark.parametrize("path", ROUTES)
def test_deep_bodies_are_refused(engine: ScriptedEngine, path: str) -> None:
    _, token = engine.open()
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert post(engine, path, deep, bearer(token))[0] == 400
    tools = [{"type": "function", "function": {"name": "f", "parameters": json.loads("[" * 900 + "]" * 900)}}]
    assert post(engine, path, {**ROUTES[path], "tools": tools}, bearer(token))[0] in (200, 400)


def test_noise_on_the_socket_is_survived(engine: ScriptedEngine) -> None:
    port = int(engine.endpoint.url.rpartition(":")[2])
    for noise in (b"\0\1\2\n\n", b"GET", b"POST /v1/models HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"x" * 100_000):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(noise)
    _, token = engine.open()
    engine.answer = lambda call: words("fine")
    status, answer = post(engine, "/v1/chat/completions", CHAT, bearer(token))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "fine")
