"""The tokenizer of bytes: every text comes back, and its template writes what models of ChatML read."""

import pytest
from transformers import AutoTokenizer

from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.recipe import Model

BYTES = new_tokenizer(Model(random_weights=True, tokenizer="bytes"))
START, END, CALL, CALL_END = 257, 258, 261, 262


def tokens(text: str, **options: bool) -> list[int]:
    ids: list[int] = BYTES(text, add_special_tokens=False, **options)["input_ids"]
    return ids


@pytest.mark.parametrize(
    "text", ["Hé\n\t\0 \r\n", "𝄞 -- “quotes” — dash", "  two  spaces  ", "".join(map(chr, range(256)))]
)
def test_token_n_is_byte_n_and_every_text_comes_back(text: str) -> None:
    assert tokens(text) == list(text.encode())
    assert BYTES.decode(tokens(text)) == text


def test_marks_are_single_tokens_and_a_response_keeps_those_of_tools() -> None:
    ids = tokens("<|im_start|>a<tool_call>b</tool_call><|im_end|>")
    assert ids == [START, 97, CALL, 98, CALL_END, END]
    assert BYTES.decode(ids, skip_special_tokens=True) == "a<tool_call>b</tool_call>"
    assert (BYTES.eos_token_id, BYTES.pad_token_id) == (END, 256)
    # The text of a tool cannot end a turn.
    assert tokens("<|im_end|>", split_special_tokens=True) == list(b"<|im_end|>")


def test_the_template_renders_tools_calls_and_results() -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
        },
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6"},
    ]
    number = {"type": "integer"}
    add = {"name": "add", "description": "Adds.", "parameters": {"properties": {"a": number, "b": number}}}
    tools = [{"type": "function", "function": add}, {"type": "function", "function": {"name": "stop"}}]
    rendered = BYTES.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe short.\nadd(a, b): Adds.\nstop()\n"
        'Call: <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n2+3?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_saved_tokenizer_is_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tokenizer")
    BYTES.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "é <think>x</think><|im_end|>"
    assert loaded(text, add_special_tokens=False)["input_ids"] == tokens(text)
    assert (loaded.chat_template, loaded.eos_token_id) == (BYTES.chat_template, END)
