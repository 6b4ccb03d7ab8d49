"""Clients that nobody here wrote, and strangers."""

import json
from typing import Any

from openai import OpenAI

from tests.unit.agents.endpoint.conftest import ScriptedEngine, ids_of, show, words

TOOL = {
    "name": "add",
    "description": "Add numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS: Any = [{"type": "function", "function": TOOL}]
TOOL_CALL = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def client_of(engine: ScriptedEngine) -> tuple[str, OpenAI]:
    episode, token = engine.open()
    return episode, OpenAI(base_url=f"{engine.endpoint.url}/v1", api_key=token, max_retries=0)


def test_a_chat_with_tools_keeps_its_tokens(engine: ScriptedEngine) -> None:
    episode, client = client_of(engine)
    engine.answer = lambda call: words(TOOL_CALL if len(engine.calls) == 1 else "It is 4.")
    messages: Any = [{"role": "user", "content": "2 + 2?"}]
    with client:
        first = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, temperature=0)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me see."
        assert message.tool_calls is not None
        assert message.tool_calls[0].type == "function"
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2}
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4<|im_end|>"}
        messages += [message.model_dump(), result]
        second = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is 4."
    assert first.id == f"chatcmpl-{episode}-{engine.calls[0].number}"
    before, after = (ids_of(call.prompt_ids) for call in engine.calls)
    assert after[: len(before) + len(engine.replies[0])] == before + engine.replies[0]
    # The reply's end token was sampled, and what the tool wrote is no end token.
    assert show(after[len(before) + len(engine.replies[0]) :]) == (
        "\n[<|im_start|>]user\n[<tool_response>]\n4<|im_end|>\n[</tool_response>][<|im_end|>]\n[<|im_start|>]assistant\n"
    )
    assert engine.counts_of(episode) == ["ignored_temperature"]
