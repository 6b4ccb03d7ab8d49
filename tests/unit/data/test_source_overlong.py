"""Prompts that are longer than ``data.max_prompt_tokens``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow.data import encoding
from rlflow.data.encoding import Reader
from rlflow.data.loading import load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import RecipeError
from tests.helpers import MODEL
from tests.unit.data.test_source import TOKENIZER, data, write

ROWS: list[dict[str, Any]] = [
    {"prompt": prompt, "response": str(row), "chosen": str(row), "rejected": "9"}
    for row, prompt in enumerate(["1+1=", "12+34+5=", "2+2=", "1+2+3+4="])
]


def opened(path: Path, *, edge: Any = "examples", **fields: Any) -> DataSource:
    options = data(
        write(path / "rows.jsonl", ROWS), **{"batch_size": 2, "max_prompt_tokens": 5, "eval_split": "test", **fields}
    )
    rows = load_rows(options, "split")
    return open_training_data(
        options,
        TOKENIZER,
        rows,
        0,
        edge=edge,
        held_out={"": (options, rows[:2])},
    )


def texts(source: DataSource) -> dict[str, str]:
    """Return each row's response by its prompt."""
    assert source.response_ids is not None
    return {
        TOKENIZER.decode(source.prompt_ids[row]): TOKENIZER.decode(source.response_ids[row][:-1])
        for row in range(len(source.rows))
    }


def test_an_error_by_default(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        opened(tmp_path)
    message = str(raised.value)
    assert message.startswith("data.max_prompt_tokens: expected at most 5 tokens, got 8 in the prompt of row 1 of ")
    assert "2 of 4 prompts are too long" in message
    assert "Fix: data.max_prompt_tokens=8, data.overlong=drop or data.overlong=truncate_left." in message


def test_rows_are_dropped_with_their_responses(tmp_path: Path) -> None:
    source = opened(tmp_path, overlong="drop")
    assert texts(source) == {"1+1=": "0", "2+2=": "2"}
    assert [row["prompt"] for row in source.rows] == ["1+1=", "2+2="]
    assert sorted(row["prompt"] for row in source.prompts(0).rows) == ["1+1=", "2+2="]
    assert [row["prompt"] for row in source.held_out_prompts().rows] == ["1+1="]
    assert source.warnings == (
        "data.overlong: 2 of 4 prompts of 'train' are longer than 5 tokens and are dropped",
        "data.overlong: 1 of 2 prompts of 'test' are longer than 5 tokens and are dropped",
    )


def test_pairs_are_dropped_together(tmp_path: Path) -> None:
    source = opened(tmp_path, overlong="drop", edge="pairs")
    assert texts(source) == {"1+1=": "0", "2+2=": "2"}
    assert source.rejected_ids is not None
    assert len(source.rejected_ids) == 2
    assert len(source.held_out_pairs()) == 2


def test_the_last_tokens_are_kept(tmp_path: Path) -> None:
    source = opened(tmp_path, overlong="truncate_left")
    assert texts(source) == {"1+1=": "0", "34+5=": "1", "2+2=": "2", "+3+4=": "3"}
    assert source.rows[1]["prompt"] == "12+34+5=", "rewards read the prompt as it was"
    assert source.warnings[0].endswith("longer than 5 tokens; only their last 5 tokens are used")


def test_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.overlong: every prompt of 'train' of '.*' is longer than 3 tokens"):
        opened(tmp_path, overlong="drop", max_prompt_tokens=3)


def test_there_is_no_warning_without_long_rows(tmp_path: Path) -> None:
    assert opened(tmp_path, overlong="drop", max_prompt_tokens=8).warnings == ()


def test_a_huge_prompt_is_too_long_without_being_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_MAX_CHARACTERS", 7)
    source = opened(tmp_path, max_prompt_tokens=100, overlong="drop")
    assert list(texts(source)) == ["1+1=", "2+2="]
    assert "data.overlong: 2 of 4 prompts of 'train' are longer than 100 tokens and are dropped" in source.warnings
    for choice in ("error", "truncate_left"):
        with pytest.raises(RecipeError, match=r"row 1 of .* has a prompt of more than 7 characters") as raised:
            opened(tmp_path, max_prompt_tokens=100, overlong=choice)
        assert raised.value.notes["Fix"] == "data.overlong=drop, or shorten the prompt"


def test_a_huge_prompt_is_dropped_whatever_characters_the_tokenizer_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_MAX_CHARACTERS", 3)
    rows = [{"prompt": "aaaa", "response": "b"}, {"prompt": "ab", "response": "b"}]
    tokenizer = load_tokenizer("policy", replace(MODEL, characters="ab"))
    options = data(write(tmp_path / "rows.jsonl", rows), overlong="drop", batch_size=1)
    source = open_training_data(options, tokenizer, load_rows(options, "split"), 0, edge="examples")
    assert [row["prompt"] for row in source.rows] == ["ab"]


@pytest.mark.parametrize("edge", ["prompts", "examples", "pairs"])
def test_a_token_without_an_embedding_is_named(edge: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("policy", MODEL)
    tokenizer.add_tokens(["<think>"])
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "2+2=", "response": "<think>4"}]
    if edge == "prompts":
        rows[1]["prompt"] = "<think>2+2="
    columns = {"chosen": "response", "rejected": "response"} if edge == "pairs" else {}
    options = data(write(tmp_path / "rows.jsonl", rows), columns=columns, max_prompt_tokens=20, batch_size=1)
    open_training_data(options, tokenizer, load_rows(options, "split"), 0, edge=edge, reader=Reader(len(tokenizer)))
    num_tokens = len(tokenizer) - 1
    with pytest.raises(RecipeError, match="row 1 of") as raised:
        open_training_data(options, tokenizer, load_rows(options, "split"), 0, edge=edge, reader=Reader(num_tokens))
    fact = f"has the token '<think>' (id {num_tokens}), and the model has embeddings for {num_tokens} tokens"
    assert raised.value.path == "data.source"
    assert fact in str(raised.value)
