"""Rows whose prompts are lists of messages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow.data.loading import load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import RecipeError
from tests.helpers import MODEL
from tests.unit.data.test_source import data, write

TOKENIZER = load_tokenizer("policy", MODEL)
# The role's length shows which role it is: user 4, system 6, assistant 9.
TOKENIZER.chat_template = (
    "{% for m in messages %}{{ m['role'] | length }}{{ m['content'] }}+{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
SHAREGPT = [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]
PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
SYSTEM = {"role": "system", "content": "77"}
AGAIN, LAST = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}


def opened(path: Path, rows: list[dict[str, Any]], *, edge: Any = "examples", **fields: Any) -> DataSource:
    options = data(write(path / "rows.jsonl", rows), **{"batch_size": 1, "max_prompt_tokens": 32, **fields})
    return open_training_data(options, TOKENIZER, load_rows(options, "split"), 0, edge=edge)


@pytest.mark.parametrize(
    ("row", "columns", "prompt", "response"),
    [
        ({"messages": [USER, ASSISTANT]}, {}, "41+1+=", "2"),
        ({"messages": [USER, ASSISTANT, AGAIN, LAST]}, {}, "41+1+92+42+2+=", "4"),
        ({"messages": [SYSTEM, USER, ASSISTANT]}, {}, "677+41+1+=", "2"),
        ({"talk": [USER, ASSISTANT]}, {"prompt": "talk"}, "41+1+=", "2"),
        ({"talk": [USER, ASSISTANT]}, {"prompt": "talk", "response": "talk"}, "41+1+=", "2"),
        ({"prompt": [USER, ASSISTANT], "response": "3"}, {}, "41+1+=", "3"),
        ({"prompt": [USER], "response": [ASSISTANT]}, {}, "41+1+=", "2"),
        ({"conversations": SHAREGPT}, {}, "41+1+=", "2"),
        ({"conversations": [{"from": "system", "value": "77"}, *SHAREGPT]}, {}, "677+41+1+=", "2"),
        ({"talk": SHAREGPT}, {"messages": "talk"}, "41+1+=", "2"),
        ({"prompt": [{"from": "human", "value": "1+1"}], "response": "3"}, {}, "41+1+=", "3"),
        ({"prompt": [{"role": "user", "content": PARTS}], "response": "3"}, {}, "41+1+=", "3"),
        ({"prompt": "1+1", "messages": [AGAIN, LAST], "response": 2}, {}, "41+1+=", "2"),
    ],
)
def test_the_prompt_ends_before_the_answer(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], prompt: str, response: str
) -> None:
    source = opened(tmp_path, [row], columns=columns)
    examples = source.examples(0)
    assert TOKENIZER.decode(examples.prompt_ids[0]) == prompt
    assert examples.response_ids[0].tolist() == [*TOKENIZER(response)["input_ids"], TOKENIZER.eos_token_id]


def test_rewards_do_not_read_the_answer_in_the_prompt(tmp_path: Path) -> None:
    source = opened(tmp_path, [{"messages": [USER, ASSISTANT]}], edge="prompts")
    assert source.prompts(0).rows[0]["prompt"] == [USER]


def test_rewards_may_read_the_prompt_as_the_model_does(tmp_path: Path) -> None:
    source = replace(opened(tmp_path, [{"prompt": [USER]}], edge="prompts"), renders_prompts=True)
    [row] = source.prompts(0).rows
    end = {TOKENIZER.eos_token_id: TOKENIZER.eos_token}
    assert row == {"prompt": [USER], "rendered_prompt": "41+1+=", "special_tokens": end}


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("1+1", "65+41+1+="), ([USER], "65+41+1+="), ([USER, ASSISTANT], "65+41+1+="), ([SYSTEM, USER], "677+41+1+=")],
)
def test_a_system_prompt_is_before_every_prompt_without_its_own(tmp_path: Path, prompt: Any, text: str) -> None:
    source = opened(tmp_path, [{"prompt": prompt}], edge="prompts", system_prompt="5")
    assert TOKENIZER.decode(source.prompts(0).ids[0]) == text


def test_arguments_of_the_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ '7' if thinks | default(true) }}{{ messages[0].content }}=")
    texts = [
        TOKENIZER.decode(opened(tmp_path, [{"prompt": "1"}], edge="prompts", template_options=chosen).prompts(0).ids[0])
        for chosen in ({}, {"thinks": False})
    ]
    assert texts == ["71=", "1="]
    with pytest.raises(RecipeError, match=r"^data\.template_options\.think: the tokenizer's chat template does not"):
        opened(tmp_path, [{"prompt": "1"}], edge="prompts", template_options={"think": False})


def test_a_system_prompt_needs_a_chat_template(tmp_path: Path) -> None:
    options = data(write(tmp_path / "rows.jsonl", [{"prompt": "1+1"}]), system_prompt="5")
    with pytest.raises(RecipeError, match=r"^data\.system_prompt: needs a chat template, and the tokenizer has none"):
        open_training_data(options, load_tokenizer("policy", MODEL), load_rows(options, "split"), 0)


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ({"messages": [ASSISTANT]}, "has no message before the assistant's"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "has a 'response' that is neither a text"),
        ({"messages": [USER, {"role": "assistant", "content": [{"text": "2"}]}]}, "has a 'response' that is neither"),
        ({"prompt": "1", "response": [USER]}, "has a 'response' that is neither a text nor a conversation that ends"),
        ({"prompt": "1", "response": {"text": "1"}}, "has a 'response' that is neither a text nor a conversation"),
        ({"prompt": [{"from": "tool", "value": "1"}], "response": "1"}, "has a prompt that is neither a text nor a"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "response": "1"}, "has an image inside"),
        ({"prompt": str([USER]), "response": "1"}, "has a prompt that is the text of a list of messages"),
        ({"prompt": ' [{"content": "1"}]', "response": "1"}, "has a prompt that is the text of a list of messages"),
        ({"prompt": json.dumps(SHAREGPT), "response": "1"}, "has a prompt that is the text of a list of messages"),
    ],
)  # fmt: skip
def test_values_that_are_not_text_are_refused(tmp_path: Path, row: dict[str, Any], fact: str) -> None:
    with pytest.raises(RecipeError, match=rf"data\.source: row 0 of '.*' {fact}"):
        opened(tmp_path, [row])


def test_messages_without_an_answer_have_no_response(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.columns\.response: no column 'response'"):
        opened(tmp_path, [{"messages": [USER]}])
