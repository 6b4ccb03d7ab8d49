"""OpenAI's form of requests and replies: chats, completions, and vLLM's route of tokens."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rlflow.agents.endpoint.fields import Body, check, read_content, read_limit, read_stop
from rlflow.agents.endpoint.history import Message, to_ids
from rlflow.agents.endpoint.service import Answer, Chat, Options

# Options that the recipe decides, each with the value that changes nothing. Others always count as ignored.
_NEUTRAL = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "seed": None,
    "logit_bias": {},
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "min_tokens": 0,
    "echo": False,
    "reasoning_effort": None,
    "chat_template_kwargs": {},
}


def read_options(body: Body) -> Options:
    """Return the options of a request. Raises ApiError."""
    for name in ("n", "best_of"):
        check(body.get(name) in (None, 1), f"'{name}' must be 1: an agent asks again for another reply")
    ignored = [name for name, neutral in _NEUTRAL.items() if body.get(name) is not None and body[name] != neutral]
    limit = body.get("max_completion_tokens")
    stream_options = body.get("stream_options") or {}
    return Options(
        read_limit(body.get("max_tokens") if limit is None else limit),
        read_stop(body.get("stop")),
        bool(body.get("stream")),
        isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
        body.get("logprobs") not in (None, False),
        ignored,
    )


def read_chat(body: Body) -> Chat:
    """Return a request for the next message of a chat. Raises ApiError."""
    messages, tools = body.get("messages"), body.get("tools") or []
    check(isinstance(messages, list) and messages, "'messages' must be a list of messages")
    check(isinstance(tools, list), "'tools' must be a list")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        check(isinstance(function, Mapping) and isinstance(function.get("name"), str), "a tool must be a function")
    return Chat([_read_message(message) for message in messages or ()], tools, read_options(body))


def _read_message(message: Any) -> Message:
    check(isinstance(message, Mapping), "a message must be an object")
    role = str(message.get("role"))
    role = {"developer": "system", "function": "tool"}.get(role, role)
    check(role in ("system", "user", "assistant", "tool"), f"no role {role[:40]!r}")
    clean: dict[str, Any] = {"role": role, "content": read_content(message.get("content"))}
    if role == "assistant":
        thoughts = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thoughts, str):
            clean["reasoning_content"] = thoughts
        if calls := message.get("tool_calls"):
            check(isinstance(calls, list), "'tool_calls' must be a list")
            clean["tool_calls"] = [_read_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            clean[name] = message[name]
    return clean


def _read_call(call: Any) -> Mapping[str, Any]:
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    check(isinstance(function, Mapping) and isinstance(function.get("name"), str), "a tool call must name a function")
    arguments: Any = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # else templates show the text as it is
            arguments = json.loads(arguments)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def write_usage(answer: Answer) -> dict[str, int]:
    """Return the numbers of tokens of a prompt and its reply."""
    prompt, reply = answer.num_prompt_tokens, answer.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def write_chat(answer: Answer, model: str, logprobs: Any) -> dict[str, Any]:
    """Return the answer to a chat."""
    choice = {"index": 0, "message": write_message(answer), "finish_reason": finish_reason(answer)}
    choice["logprobs"] = logprobs and {"content": logprobs, "refusal": None}
    return {**_head(answer, "chat.completion", model), "choices": [choice], "usage": write_usage(answer)}


def write_message(answer: Answer) -> dict[str, Any]:
    """Return the message of an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.tool_calls else "")}
    if answer.thoughts is not None:
        message["reasoning_content"] = answer.thoughts
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for id, name, arguments in answer.tool_calls
        ]
    return message


def stream_chat(answer: Answer, model: str, logprobs: Any, include_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield the chunks of an answer to a chat."""
    message, head = write_message(answer), _head(answer, "chat.completion.chunk", model)
    content, calls = message.pop("content"), message.pop("tool_calls", ())
    deltas = [{**message, "content": ""}, *([{"content": content}] if content else [])]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
    for delta in deltas:
        is_first = delta is deltas[0]
        chosen = {"content": logprobs, "refusal": None} if logprobs and is_first else None
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": chosen}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason(answer), "logprobs": None}]}
    if include_usage:
        yield {**head, "choices": [], "usage": write_usage(answer)}


def write_text(answer: Answer, model: str, logprobs: Any) -> dict[str, Any]:
    """Return the answer to a completion."""
    chosen = logprobs and {
        "tokens": [entry["token"] for entry in logprobs],
        "token_logprobs": [entry["logprob"] for entry in logprobs],
        "top_logprobs": None,
        "text_offset": np.cumsum([0, *(len(entry["token"]) for entry in logprobs)])[:-1].tolist(),
    }
    choice = {"index": 0, "text": answer.text, "finish_reason": finish_reason(answer), "logprobs": chosen}
    return {**_head(answer, "text_completion", model), "choices": [choice], "usage": write_usage(answer)}


def write_ids(answer: Answer) -> dict[str, Any]:
    """Return the answer to tokens, in the form of vLLM and in that of ``renderers``."""
    ids = to_ids(answer.reply.ids)
    entries = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}
        for token, logprob in zip(ids, to_logprobs(answer), strict=True)
    ]
    logprobs = {"content": entries}
    choice = {"index": 0, "token_ids": ids, "finish_reason": finish_reason(answer), "logprobs": logprobs}
    return {"request_id": f"gen-{answer.id}", "choices": [choice], "usage": write_usage(answer)}


def to_logprobs(answer: Answer) -> Sequence[float]:
    """Return the logprobs of a reply."""
    logprobs: list[float] = np.frombuffer(answer.reply.logprobs, np.float32).tolist()
    return logprobs


def finish_reason(answer: Answer) -> str:
    """Return why a reply ends."""
    return "length" if answer.is_cut else "tool_calls" if answer.tool_calls else "stop"


def _head(answer: Answer, kind: str, model: str) -> dict[str, Any]:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{answer.id}", "object": kind, "created": int(time.time()), "model": model}
