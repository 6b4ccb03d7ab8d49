"""Clients that nobody here wrote."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic import BadRequestError as AnthropicBadRequestError
from openai import APIConnectionError, AsyncOpenAI, BadRequestError, OpenAI
from renderers.client import _parse_completion_logprobs, parse_generate_response

from rlflow.agents.messages import Refusal
from tests.unit.agents.endpoint.conftest import ScriptedEngine, ids_of, post, show, wait_for, words

pytestmark = pytest.mark.slow  # the endpoint takes some seconds to start

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
ANTHROPIC_TOOLS: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
TOOL_CALL = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
QUESTION: Any = [{"role": "user", "content": "2 + 2?"}]
# The text after the reply with the tool call. The end token was sampled, and that of the tool's result is text.
AFTER_TOOL = (
    "\n[<|im_start|>]user\n[<tool_response>]\n4<|im_end|>\n[</tool_response>][<|im_end|>]\n[<|im_start|>]assistant\n"
)


@pytest.fixture
def episode(engine: ScriptedEngine) -> tuple[str, str]:
    return engine.open()


@pytest.fixture
def openai(engine: ScriptedEngine, episode: tuple[str, str]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{engine.endpoint.url}/v1", api_key=episode[1], max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic(engine: ScriptedEngine, episode: tuple[str, str]) -> Iterator[Anthropic]:
    with Anthropic(base_url=engine.endpoint.url, api_key=episode[1], max_retries=0) as client:
        yield client


def added_tokens(engine: ScriptedEngine) -> str:
    """Return what the last prompt has after the prompt before and its reply, which it must begin with."""
    before, after = (ids_of(call.prompt_ids) for call in engine.calls[-2:])
    before += engine.replies[len(engine.calls) - 2]
    assert after[: len(before)] == before
    return show(after[len(before) :])


def test_openai_chats_with_tools(engine: ScriptedEngine, episode: tuple[str, str], openai: OpenAI) -> None:
    engine.answer = lambda call: words(TOOL_CALL if len(engine.calls) == 1 else "It is 4.")
    first = openai.chat.completions.create(model="policy", messages=QUESTION, tools=TOOLS, temperature=0)
    message = first.choices[0].message
    assert (first.choices[0].finish_reason, message.content) == ("tool_calls", "Let me see.")
    assert message.tool_calls is not None
    assert message.tool_calls[0].type == "function"
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2}
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4<|im_end|>"}
    messages = [*QUESTION, message.model_dump(), result]
    second = openai.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is 4."
    assert first.id == f"chatcmpl-{episode[0]}-{engine.calls[0].number}"
    assert added_tokens(engine) == AFTER_TOOL
    assert first.usage is not None
    assert first.usage.prompt_tokens == len(ids_of(engine.calls[0].prompt_ids))
    assert first.usage.completion_tokens == len(words(TOOL_CALL))
    assert engine.counts_of(episode[0]) == ["ignored_temperature"]


def test_openai_streams(engine: ScriptedEngine, openai: OpenAI) -> None:
    engine.answer = lambda call: words(TOOL_CALL)
    with openai.chat.completions.stream(
        model="policy", messages=QUESTION, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        completion = stream.get_final_completion()
    message = completion.choices[0].message
    assert (message.content, completion.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"a": 2}'
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(words(TOOL_CALL))


def test_openai_logprobs_and_completions(engine: ScriptedEngine, openai: OpenAI) -> None:
    engine.answer = lambda call: words("hé", finished=len(engine.calls) > 1)
    chat = openai.chat.completions.create(model="policy", messages=QUESTION, logprobs=True, max_tokens=3)
    assert chat.choices[0].finish_reason == "length"
    assert engine.calls[0].max_tokens == 3
    assert chat.choices[0].logprobs is not None
    assert [entry.logprob for entry in chat.choices[0].logprobs.content or ()] == [-0.5] * 3
    text = openai.completions.create(model="policy", prompt="Oh, ", logprobs=1)
    assert (text.choices[0].text, text.choices[0].finish_reason) == ("hé", "stop")
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.tokens == ["h", "\ufffd", "\ufffd", "<|im_end|>"]
    # A text that continues an earlier one keeps its tokens, here the end token that the text does not show.
    pieces = openai.completions.create(model="policy", prompt="Oh, hé? ", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "hé"
    assert ids_of(engine.calls[2].prompt_ids) == [*b"Oh, ", *words("hé"), *b"? "]


def test_stop_texts_cut_the_text_and_not_the_tokens(engine: ScriptedEngine, openai: OpenAI) -> None:
    engine.answer = lambda call: words("Thought: x\nObservation: made up")
    first = openai.chat.completions.create(model="policy", messages=QUESTION, stop=["Observation:", "\n\n"])
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("Thought: x\n", "stop")
    # This client strips what it sends back.
    messages: Any = [*QUESTION, {"role": "assistant", "content": "Thought: x"}, {"role": "user", "content": "7"}]
    openai.chat.completions.create(model="policy", messages=messages)
    assert added_tokens(engine) == "\n[<|im_start|>]user\n7[<|im_end|>]\n[<|im_start|>]assistant\n"


def test_anthropic_chats_with_tools(engine: ScriptedEngine, episode: tuple[str, str], anthropic: Anthropic) -> None:
    engine.answer = lambda call: words(TOOL_CALL if len(engine.calls) == 1 else "It is 4.")
    options: Any = {"model": "policy", "max_tokens": 50, "system": "Be brief.", "tools": ANTHROPIC_TOOLS}
    first = anthropic.messages.create(messages=QUESTION, **options)
    assert first.stop_reason == "tool_use"
    text, call = first.content
    assert (text.type, call.type) == ("text", "tool_use")
    assert call.type == "tool_use"
    assert call.input == {"a": 2}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "4<|im_end|>"}]}
    messages: Any = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with anthropic.messages.stream(messages=messages, **options) as stream:
        second = stream.get_final_message()
    assert (second.stop_reason, second.content[0].type) == ("end_turn", "text")
    assert "".join(block.text for block in second.content if block.type == "text") == "It is 4."
    assert first.id == f"msg-{episode[0]}-{engine.calls[0].number}"
    assert added_tokens(engine) == AFTER_TOOL
    assert second.usage.output_tokens == len(words("It is 4."))
    counted = anthropic.messages.count_tokens(
        model="policy", system="Be brief.", tools=ANTHROPIC_TOOLS, messages=QUESTION
    )
    assert counted.input_tokens == first.usage.input_tokens == len(ids_of(engine.calls[0].prompt_ids))


def test_anthropic_streams_a_tool_call(engine: ScriptedEngine, anthropic: Anthropic) -> None:
    engine.answer = lambda call: words(TOOL_CALL)
    with anthropic.messages.stream(model="policy", max_tokens=50, tools=ANTHROPIC_TOOLS, messages=QUESTION) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[1].type == "tool_use"
    assert message.content[1].input == {"a": 2}


def test_thoughts_are_a_part_of_their_own(engine: ScriptedEngine, openai: OpenAI, anthropic: Anthropic) -> None:
    engine.answer = lambda call: words("<think>hm</think>4")
    message = openai.chat.completions.create(model="policy", messages=QUESTION).choices[0].message
    assert (message.content, message.model_dump()["reasoning_content"]) == ("4", "hm")
    # The client drops the thoughts, and the tokens keep them.
    messages: Any = [*QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    openai.chat.completions.create(model="policy", messages=messages)
    assert added_tokens(engine) == "\n[<|im_start|>]user\nSure?[<|im_end|>]\n[<|im_start|>]assistant\n"
    blocks = anthropic.messages.create(model="policy", max_tokens=50, messages=QUESTION).content
    assert [block.type for block in blocks] == ["thinking", "text"]


def test_limits_are_errors_of_the_client(engine: ScriptedEngine, openai: OpenAI, anthropic: Anthropic) -> None:
    engine.answer = lambda call: Refusal(call.number, "calls", "max_calls is reached")
    with pytest.raises(BadRequestError, match="max_calls is reached") as refused:
        openai.chat.completions.create(model="policy", messages=QUESTION)
    assert refused.value.code == "rlflow_limit_reached"
    with pytest.raises(AnthropicBadRequestError, match="max_calls is reached"):
        anthropic.messages.create(model="policy", max_tokens=50, messages=QUESTION)
    with pytest.raises(BadRequestError) as too_long:
        openai.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 20000}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError, match="'n' must be 1"):
        openai.chat.completions.create(model="policy", messages=QUESTION, n=2)
    assert len(engine.calls) == 2


def test_a_reply_is_no_longer_than_its_limits(engine: ScriptedEngine, episode: tuple[str, str]) -> None:
    for length, asked, limit in ((1, None, 256), (1, 1000, 256), (16288, None, 96), (16288, 5, 5)):
        body = {"prompt": [32] * length, "max_tokens": asked}
        assert post(engine, "/v1/completions", body, {"x-api-key": episode[1]})[0] == 200
        assert engine.calls[-1].max_tokens == limit


def test_a_client_that_goes_away_cancels_its_call(engine: ScriptedEngine, episode: tuple[str, str]) -> None:
    engine.answer = lambda call: None

    async def ask() -> None:
        url = f"{engine.endpoint.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=episode[1], max_retries=1, timeout=0.5) as client:
            await client.chat.completions.create(model="policy", messages=QUESTION)

    with pytest.raises(APIConnectionError):
        asyncio.run(ask())
    wait_for(lambda: len(engine.cancelled) == 2)
    assert [call.is_repeated for call in engine.calls] == [False, True]
    assert engine.cancelled == [call.number for call in engine.calls]


def test_renderers_reads_replies_to_tokens(engine: ScriptedEngine, episode: tuple[str, str]) -> None:
    """The worker's key and a name are the way of verifiers, which asks for the models first."""
    key = {"Authorization": "Bearer worker"}
    name = {"X-Session-ID": f"trace of {episode[0]}"}
    own = {"Authorization": f"Bearer {episode[1]}"}
    status, models = post(engine, "/v1/models", None, key)
    assert (status, models["data"][0]["max_model_len"]) == (200, 16384)
    body = {"model": "policy", "token_ids": [1, 2], "sampling_params": {"max_tokens": 7, "logprobs": 1, "seed": 5}}
    assert post(engine, "/inference/v1/generate", body, key | name)[0] == 401
    assert post(engine, "/rlflow/name", {"name": name["X-Session-ID"]}, own, "PUT") == (200, {})
    status, answer = post(engine, "/inference/v1/generate", body, key | name | {"Idempotency-Key": "a"})
    choice = parse_generate_response(json.dumps(answer).encode())["choices"][0]
    assert choice["token_ids"] == words("ok")
    assert _parse_completion_logprobs(choice, choice["token_ids"]) == [-0.5] * 3
    assert answer["request_id"] == f"gen-{episode[0]}-{engine.calls[0].number}"
    assert (ids_of(engine.calls[0].prompt_ids), engine.calls[0].max_tokens) == ([1, 2], 7)
    assert post(engine, "/inference/v1/generate", body, key | name | {"Idempotency-Key": "a"})[0] == 200
    assert [call.is_repeated for call in engine.calls] == [False, True]
    assert engine.counts_of(episode[0]) == ["ignored_seed"] * 2
