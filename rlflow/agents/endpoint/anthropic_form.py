"""Anthropic's form of chats."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlflow.agents.endpoint.fields import Body, check, read_content, read_limit, read_stop
from rlflow.agents.endpoint.history import Message
from rlflow.agents.endpoint.service import Answer, Chat, Options

_IGNORED = ("temperature", "top_p", "top_k", "thinking")


def read_messages(body: Body) -> Chat:
    """Return a request for the next message of a chat. Raises ApiError."""
    messages, tools = body.get("messages"), body.get("tools") or []
    check(isinstance(messages, list) and messages, "'messages' must be a list of messages")
    check(isinstance(tools, list), "'tools' must be a list")
    chat: list[Message] = [{"role": "system", "content": read_content(body["system"])}] if body.get("system") else []
    for message in messages or ():
        chat += _read_message(message)
    ignored = [name for name in _IGNORED if body.get(name) is not None]
    choice = body.get("tool_choice")
    if choice is not None and not (isinstance(choice, Mapping) and choice.get("type") == "auto"):
        ignored.append("tool_choice")
    limit, stop = read_limit(body.get("max_tokens")), read_stop(body.get("stop_sequences"))
    options = Options(limit, stop, bool(body.get("stream")), ignored=ignored)
    return Chat(chat, [_read_tool(tool) for tool in tools], options)


def _read_tool(tool: Any) -> Mapping[str, Any]:
    is_valid = isinstance(tool, Mapping) and isinstance(tool.get("name"), str) and "input_schema" in tool
    check(is_valid, "a tool must have a name and an input_schema")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _read_message(message: Any) -> list[Message]:
    """Return the messages of OpenAI's form: each result of a tool is one of its own."""
    check(isinstance(message, Mapping), "a message must be an object")
    role, content = message.get("role"), message.get("content")
    check(role in ("system", "user", "assistant"), f"no role {str(role)[:40]!r}")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    check(all(isinstance(block, Mapping) for block in blocks), "a block must be an object")
    texts, calls, results = [], [], []
    thoughts = ""
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(read_content(block.get("text")))
        elif kind == "tool_use":
            check(isinstance(block.get("name"), str), "a tool_use must name a tool")
            function = {"name": block["name"], "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "tool_result":
            result = {"role": "tool", "tool_call_id": str(block.get("tool_use_id"))}
            results.append({**result, "content": read_content(block.get("content"))})
        elif kind == "thinking":
            thoughts += read_content(block.get("thinking"))
        else:
            check(kind == "redacted_thinking", f"no block of type {str(kind)[:40]!r} can be read")
    if role != "assistant":
        return [*results, *([{"role": role, "content": "".join(texts)}] if texts or not results else [])]
    reply: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if thoughts:
        reply["reasoning_content"] = thoughts
    return [{**reply, "tool_calls": calls} if calls else reply]


def write_messages(answer: Answer, model: str) -> dict[str, Any]:
    """Return the answer to a chat."""
    blocks: list[dict[str, Any]] = []
    if answer.thoughts is not None:
        blocks.append({"type": "thinking", "thinking": answer.thoughts, "signature": ""})
    if answer.text or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.text})
    for id, name, arguments in answer.tool_calls:
        blocks.append({"type": "tool_use", "id": id, "name": name, "input": arguments})
    reason = "max_tokens" if answer.is_cut else "tool_use" if answer.tool_calls else "end_turn"
    return {
        "id": f"msg-{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": reason if answer.stop is None else "stop_sequence",
        "stop_sequence": answer.stop,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens},
    }


def stream_messages(answer: Answer, model: str) -> Iterator[dict[str, Any]]:
    """Yield the events of an answer to a chat."""
    message = write_messages(answer, model)
    usage = message["usage"]
    start = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**start, "usage": {**usage, "output_tokens": 0}}}
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        if kind == "tool_use":
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            empty = {**block, kind if kind == "thinking" else "text": ""}
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": usage}
    yield {"type": "message_stop"}
