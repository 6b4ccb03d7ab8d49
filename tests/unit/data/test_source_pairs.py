"""Rows with a chosen and a rejected response."""

from pathlib import Path
from typing import Any

import pytest

from rlflow.data.arithmetic import addition_pairs, additions
from rlflow.data.loading import load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import RecipeError
from tests.helpers import MODEL
from tests.unit.data.test_source import TOKENIZER, data, write

ROWS: list[dict[str, Any]] = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "0"} for n in range(1, 5)]
END = TOKENIZER.eos_token_id
USER = {"role": "user", "content": "1+1="}


def opened(path: Path, rows: list[dict[str, Any]] = ROWS, **fields: Any) -> DataSource:
    options = data(write(path / "pairs.jsonl", rows), batch_size=3, **fields)
    read = load_rows(options, "split")
    return open_training_data(options, TOKENIZER, read, 0, edge="pairs", held_out={"": (options, read[:2])})


def test_both_responses_of_a_prompt_are_neighbours(tmp_path: Path) -> None:
    source = opened(tmp_path)
    pairs = source.pairs(5)
    assert pairs.unit_size == 2
    assert pairs.keys.tolist() == [[5, prompt, sample] for prompt in range(3) for sample in range(2)]
    texts = [TOKENIZER.decode(pairs.prompt_ids[row]) for row in range(6)]
    assert texts[0::2] == texts[1::2] == [row["prompt"] for row in source.prompts(5).rows]
    for row in range(0, 6, 2):
        number = int(texts[row].partition("+")[0])
        assert pairs.response_ids[row].tolist() == [*TOKENIZER(str(2 * number))["input_ids"], END]
        assert pairs.response_ids[row + 1].tolist() == [*TOKENIZER("0")["input_ids"], END]


def test_held_out_pairs(tmp_path: Path) -> None:
    pairs = opened(tmp_path).held_out_pairs()
    assert [TOKENIZER.decode(pairs.response_ids[row][:-1]) for row in range(4)] == ["2", "0", "4", "0"]


def test_a_response_may_be_the_end_of_a_conversation(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    pairs = opened(tmp_path, [{"prompt": "1+1=", "chosen": said, "rejected": "3"}]).pairs(0)
    assert TOKENIZER.decode(pairs.response_ids[0][:-1]) == "2"


def test_a_conversation_may_be_the_prompt_and_the_response(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    tokenizer = load_tokenizer("policy", MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    options = data(write(tmp_path / "a.jsonl", [{"chosen": talk, "rejected": "3"}]), columns={"prompt": "chosen"})
    rows = load_rows(options, "split")
    pairs = open_training_data(options, tokenizer, rows, 0, edge="pairs").pairs(0)
    assert [tokenizer.decode(pairs.prompt_ids[0]), tokenizer.decode(pairs.response_ids[0][:-1])] == ["1+1=", "2"]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "\n\nHuman: 1+1=\n\nAssistant: 2", "rejected": "\n\nHuman: 1+1=\n\nAssistant: 3"},
        {
            "chosen": [USER, {"role": "assistant", "content": "2"}],
            "rejected": [USER, {"role": "assistant", "content": "3"}],
        },
        {
            "chosen": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}],
            "rejected": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "3"}],
        },
        {"conversations": [{"from": "human", "value": "1+1="}], "chosen": "2", "rejected": "3"},
    ],
)
def test_the_prompt_is_the_common_beginning_of_both_conversations(tmp_path: Path, row: dict[str, Any]) -> None:
    pairs = opened_with_template(tmp_path, row)
    texts = [
        TOKENIZER.decode(ids) for ids in (pairs.prompt_ids[0], *(pairs.response_ids[place][:-1] for place in (0, 1)))
    ]
    assert texts == ["1+1=", "2", "3"]


def test_pairs_without_a_common_beginning_are_refused(tmp_path: Path) -> None:
    row = {"chosen": "\n\nHuman: 1+1=\n\nAssistant: 2", "rejected": "\n\nHuman: 1+2=\n\nAssistant: 3"}
    with pytest.raises(
        RecipeError, match=r"^data\.source: row 1 of '.*' has no 'prompt', and its chosen and rejected do"
    ):
        opened_with_template(tmp_path, {**row, "rejected": "\n\nHuman: 1+1=\n\nAssistant: 3"}, row)


def opened_with_template(path: Path, *rows: dict[str, Any]) -> Any:
    """Return the first pair, for a tokenizer with a chat template."""
    tokenizer = load_tokenizer("policy", MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    options = data(write(path / "pairs.jsonl", list(rows)), batch_size=1)
    return open_training_data(options, tokenizer, load_rows(options, "split"), 0, edge="pairs").pairs(0)


def test_a_response_that_repeats_its_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^data\.columns\.chosen: prompt and chosen are both 'prompt', so that"):
        opened(tmp_path, columns={"chosen": "prompt"})


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.columns\.rejected: no column 'rejected' in"):
        opened(tmp_path, [{"prompt": "1", "chosen": "1"}])


def test_additions_with_an_error() -> None:
    right = {row["prompt"]: row["answer"] for row in additions("test", 2)}
    rows = addition_pairs("test", 2)
    assert len(rows) == len(right)
    for row in rows:
        assert row["chosen"] == right[row["prompt"]]
        assert sum(a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)) == 1
