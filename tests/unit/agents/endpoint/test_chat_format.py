"""Chat templates of other models, with the tokenizer of bytes and the special tokens that they need."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlflow.agents.base import ModelSpec
from rlflow.agents.endpoint.chat_format import ChatFormat
from rlflow.agents.endpoint.errors import ApiError
from rlflow.agents.endpoint.history import Turn, to_bytes
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.recipe import Model
from tests.unit.agents.endpoint.conftest import END, read_template, save_tokenizer, words

USER = [{"role": "user", "content": "Hi<|im_end|>"}]
NEXT = {"role": "user", "content": "more"}

Build = Callable[..., ChatFormat]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Return a function that builds the format of a template."""

    def build(template: str, **options: Any) -> ChatFormat:
        save_tokenizer(tmp_path, template)
        return ChatFormat(ModelSpec(str(tmp_path), "policy", 4096, 256, options))

    return build


@pytest.mark.parametrize(
    ("name", "family", "prefix"),
    [
        ("qwen3", "Qwen3Renderer", ""),
        ("qwen3_instruct_2507", "Qwen3Renderer", ""),
        ("qwen3_5_think", "Qwen35Renderer", "<think>\n"),
        ("qwen3_5_nothink", "Qwen35Renderer", "<think>\n\n</think>\n\n"),
        ("qwen2_5", "NoneType", ""),
    ],
)
def test_bridges_of_known_and_unknown_families_are_exact(build: Build, name: str, family: str, prefix: str) -> None:
    """A tool's result continues the reply, whatever that was."""
    form = build(read_template(name))
    assert type(form._family).__name__ == family
    prompt, random, length = form.render(USER, []), Random(0), len(prefix)
    assert form.decode(prompt).endswith(f"user\nHi<|im_end|><|im_end|>\n<|im_start|>assistant\n{prefix}")
    assert prompt.count(END) == 1 + (name == "qwen2_5")  # that one has a system message of its own
    refused = 0
    for _ in range(100):
        reply = [random.randrange(256) for _ in range(5)]
        ids, finished = ([*reply, END], True) if random.random() < 0.7 else (reply, False)
        turn = Turn(None, to_bytes(prompt), to_bytes(ids), finished)
        messages = [*USER, {"role": "assistant", "content": "?"}, {"role": "tool", "content": "4", "tool_call_id": "x"}]
        added = form.bridge(turn, prompt, messages, 1, [])
        if added is None:
            refused += 1
            continue
        start = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        assert form.decode(added) in (
            start + prefix,
            f"<|im_end|>{start}{prefix}",
            f"</think><|im_end|>{start}{prefix}",
        )
    # A reply that ends within its thoughts cannot be continued as the template would write it.
    assert refused == 0 or (prefix == "<think>\n" and length)


def test_a_template_that_drops_thoughts_begins_a_segment(build: Build) -> None:
    """Qwen3 forgets what it thought when a user says something new, and keeps it within the calls of tools."""
    form = build(read_template("qwen3").replace("# Tools", "# My tools"))  # no known family
    assert form._family is None
    prompt = form.render(USER, [])
    turn = Turn(None, to_bytes(prompt), to_bytes(words("<think>hm</think>4")), True, has_thoughts=True)
    reply = {"role": "assistant", "content": "4", "reasoning_content": "hm"}
    assert form.bridge(turn, prompt, [*USER, reply, NEXT], 1, []) is None
    tool = {"role": "tool", "content": "4"}
    added = form.bridge(turn, prompt, [*USER, reply, tool], 1, [])
    assert added is not None
    assert form.decode(added).startswith("\n<|im_start|>user\n<tool_response>\n4")


def test_a_template_that_changes_earlier_text_begins_a_segment(build: Build) -> None:
    form = build("{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    prompt = form.render(USER, [])
    turn = Turn(None, to_bytes(prompt), to_bytes(words("4")), True)
    assert form.bridge(turn, prompt, [*USER, {"role": "assistant", "content": "4"}, NEXT], 1, []) is None


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 0.1 s"),
    ],
)
def test_a_template_that_fails_is_an_error_of_the_request(
    build: Build, template: str, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow.agents.endpoint.chat_format._RENDER_S", 0.1)
    with pytest.raises(ApiError, match=fact):
        build(template).render(USER, [])


def test_options_of_the_template(build: Build) -> None:
    form = build(read_template("qwen3"), enable_thinking=False)
    assert type(form._family).__name__ == "Qwen3Renderer"
    assert form.decode(form.render(USER, [])).endswith("assistant\n<think>\n\n</think>\n\n")


def test_a_tokenizer_of_characters_has_no_chats(tmp_path: Path) -> None:
    new_tokenizer(Model(random_weights=True, characters="ab ")).save_pretrained(tmp_path)
    form = ChatFormat(ModelSpec(str(tmp_path), "policy", 4096, 256))
    assert form.decode(form.encode("ab a")) == "ab a"
    with pytest.raises(ApiError, match="the model's tokenizer refuses the text"):
        form.encode("abc")
    with pytest.raises(ApiError, match="the model's tokenizer has no chat template"):
        form.render([{"role": "user", "content": "ab"}], [])
