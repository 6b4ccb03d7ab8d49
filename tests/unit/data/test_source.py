import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Packed, Repeated, Sequences
from rlflow.data.arithmetic import additions
from rlflow.data.loading import describe_rows, load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import RecipeError
from rlflow.recipe import Data
from tests.helpers import MODEL

TOKENIZER = load_tokenizer("policy", MODEL)
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(7)]


def data(source: object, **fields: Any) -> Data:
    return Data(**{"source": str(source), "batch_size": 3, "max_prompt_tokens": 8, **fields})


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some_rows(split: str, count: int = 7) -> list[dict[str, str]]:
    return ROWS[:count]


def opened(data: Data, tokenizer: Any = TOKENIZER, seed: int = 0, *, edge: Any = "prompts") -> DataSource:
    return open_training_data(data, tokenizer, load_rows(data, "split"), seed, edge=edge)


def test_every_row_once_an_epoch_in_a_new_order(tmp_path: Path) -> None:
    source = opened(data(write(tmp_path / "a.jsonl", ROWS)), seed=0)
    seen = [row["prompt"] for step in range(7) for row in source.prompts(step).rows]
    epochs = [seen[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == sorted(row["prompt"] for row in ROWS) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_step_does_not_depend_on_those_before(tmp_path: Path) -> None:
    source = opened(data(write(tmp_path / "a.jsonl", ROWS)), seed=0)
    again = opened(data(tmp_path / "a.jsonl"), seed=0)
    source.prompts(0)
    assert source.prompts(4).rows == again.prompts(4).rows
    other = opened(data(tmp_path / "a.jsonl"), seed=1)
    assert [other.prompts(s).rows for s in range(3)] != [again.prompts(s).rows for s in range(3)]


def test_tokens_of_prompt_and_response(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "1+2=", "answer": "3"}])
    columns = {"prompt": "question", "response": "answer"}
    options = data(path, columns=columns, batch_size=1)
    examples = opened(options, edge="examples").examples(0)
    assert TOKENIZER.decode(examples.prompt_ids[0]) == "1+2="
    assert examples.response_ids[0].tolist() == [*TOKENIZER("3")["input_ids"], TOKENIZER.eos_token_id]


def test_a_response_that_repeats_its_prompt_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1+2=", "answer": "3"}])
    with pytest.raises(RecipeError, match=r"^data\.columns\.response: prompt and response are both 'prompt', so that"):
        opened(data(path, columns={"response": "prompt"}), edge="examples")
    copied = opened(data(path, columns={"answer": "prompt"})).prompts(0)
    assert copied.rows[0]["answer"] == "1+2="


def test_parquet_and_a_folder_with_splits(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    one = opened(data(tmp_path / "rows.parquet"), seed=0)
    assert len(one.rows) == 7
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", ROWS[:5])
    write(folder / "test.jsonl", ROWS[5:])
    options = data(folder, eval_split="test")
    apart = load_rows(options, "eval_split")
    held_out = open_training_data(options, TOKENIZER, apart, 0, held_out={"": (options, apart)})
    assert [row["prompt"] for row in held_out.held_out_prompts().rows] == ["5+5=", "6+6="]


def test_chat_template_and_messages(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("policy", MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    rows: list[dict[str, Any]] = [{"prompt": "1+1"}, {"prompt": [{"role": "user", "content": "2+2"}]}]
    texts: list[str] = []
    for row in rows:
        path = write(tmp_path / f"{len(texts)}.jsonl", [row])
        options = data(path, system_prompt="0", batch_size=1)
        texts.append(tokenizer.decode(opened(options, tokenizer).prompts(0).ids[0]))
    assert texts == ["01+1=", "02+2="]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "nowhere.jsonl"}, "data.source: 'nowhere.jsonl' does not exist"),
        (
            {"source": __file__},
            "data.source: files of the type '.py' are not supported.\n  Known: .jsonl, .ndjson, .json, .csv,",
        ),
        ({"columns": {"prompt": "promt"}}, "data.columns.prompt: no column 'promt' in"),
        ({"columns": {"response": "reply"}}, "data.columns.response: no column 'reply' in"),
        ({"split": "test"}, "data.split: 'test' of"),
        (
            {"max_prompt_tokens": 3, "columns": {"response": "answer"}},
            "data.max_prompt_tokens: expected at most 3 tokens, got 4 in the prompt of row 0 of",
        ),
        ({"source": f"{__name__}:nothing"}, f"data.source: '{__name__}:nothing': '{__name__}' has no 'nothing'"),
        (
            {"source": f"{__name__}:some_rows", "options": {"n": 1}},
            f"data.source: '{__name__}:some_rows' failed (TypeE",
        ),
        ({"source": f"{__name__}:some_rows", "options": {"count": 0}}, "data.split: 'train' of"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(RecipeError) as raised:
        opened(data(**{"source": path, **fields}), edge="examples")
    assert str(raised.value).startswith(message)


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.split: 'train' of .* has no rows"):
        opened(data(write(tmp_path / "a.jsonl", [])), seed=0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "1"}, {"other": "2"}], "data.source: row 1 of"),
        ([{"prompt": "1"}, {"prompt": ""}], "data.source: row 1 of"),
        ([{"prompt": "one"}], "data.source: the tokenizer refuses a text of"),
        ([{"prompt": [{"role": "user", "content": "1"}]}], "data.columns.prompt: prompts are not texts, and the"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        opened(data(write(tmp_path / "a.jsonl", rows)))
    assert str(raised.value).startswith(message)


def test_columns_that_the_reward_reads_have_their_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": "1+2=", "solution": "3"}])
    rows = load_rows(data(path, columns={"prompt": "q", "answer": "solution"}), "split")
    assert (rows[0]["prompt"], rows[0]["answer"]) == ("1+2=", "3")


def test_columns_can_be_swapped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1", "chosen": "2", "rejected": "3"}])
    rows = load_rows(data(path, columns={"chosen": "rejected", "rejected": "chosen"}), "split")
    assert rows == [{"prompt": "1", "chosen": "3", "rejected": "2"}]


def test_additions_are_right_and_the_splits_share_nothing() -> None:
    splits = {split: additions(split, digits=2) for split in ("train", "test")}
    assert len(splits["train"]) + len(splits["test"]) == 100 * 100
    assert 800 < len(splits["test"]) < 1200
    for rows in splits.values():
        for row in rows:
            left, right = row["prompt"].rstrip("=").split("+")
            assert int(left) + int(right) == int(row["answer"])
    sums = {split: {frozenset(row["prompt"].rstrip("=").split("+")) for row in rows} for split, rows in splits.items()}
    assert not sums["train"] & sums["test"]


@pytest.mark.parametrize("digits", [0, 4, 100, "2"])
def test_additions_of_other_than_one_to_three_digits_are_refused(digits: object) -> None:
    with pytest.raises(RecipeError, match="expected 1, 2 or 3 digits") as raised:
        load_rows(data("rlflow.data.arithmetic:additions", options={"digits": digits}), "split")
    assert raised.value.notes["Fix"] == "see data.options"


def test_long_texts_of_samples_have_a_gap_in_the_middle(tmp_path: Path) -> None:
    ids = [Packed.from_rows([TOKENIZER.encode(text)], np.int32) for text in ("1+2=", "1" * 20_000 + "2" * 20_000)]
    given = Sequences(keys=np.zeros((1, 3), np.int64), prompt_ids=ids[0], response_ids=ids[1])
    source = opened(data(write(tmp_path / "a.jsonl", ROWS)))
    assert source.texts(given) == [("1+2=", "1" * 2**14 + " [...] " + "2" * 2**14)]


def test_samples_show_the_prompt_of_each_segment(tmp_path: Path) -> None:
    def packed(*texts: str) -> Packed:
        return Packed.from_rows([TOKENIZER.encode(text) for text in texts], np.int32)

    def segments(*rows: list[int]) -> Repeated:
        numbers = np.concatenate([np.arange(len(lengths)) for lengths in rows])
        return Repeated(numbers, np.concatenate(rows), np.array([len(lengths) for lengths in rows]))

    given = Sequences(
        keys=np.zeros((2, 3), np.int64),
        prompt_ids=packed("1+2=7+7=", "5+5="),
        response_ids=packed("3144", "10"),
        prompt_segments=segments([4, 4], [4]),
        response_segments=segments([1, 3], [2]),
    )
    source = opened(data(write(tmp_path / "a.jsonl", ROWS)))
    assert source.texts(given) == [("1+2=", "3\n[segment 2]\n7+7=144"), ("5+5=", "10")]


def test_columns_reach_into_structs(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"q": {"text": "1+2="}, "reward_model": {"ground_truth": ["3"]}, "a.b": "dot"},
        {"q": {"text": "1+1="}},
    ]
    columns = {"prompt": "q.text", "answer": "reward_model.ground_truth", "dotted": "a.b"}
    loaded = load_rows(data(write(tmp_path / "a.jsonl", rows), columns=columns), "split")
    assert [row["prompt"] for row in loaded] == ["1+2=", "1+1="]
    assert [row["answer"] for row in loaded] == [["3"], None]
    assert loaded[0]["dotted"] == "dot"


@pytest.mark.slow
def test_the_digest_of_rows_follows_from_their_values_alone(tmp_path: Path) -> None:
    """Sets have another order in each process, and a long array's text leaves out its middle."""
    program = (
        "from rlflow.data.loading import describe_rows; print(describe_rows([{'a': set('abcdef'), 'b': object()}]))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    arrays = [np.arange(5000), np.arange(5000)]
    arrays[1][2500] = 0
    changed: list[list[dict[str, Any]]] = [
        [{"a": 1}],
        [{"a": 1.0}],
        [{"a": "1"}],
        [{"a": None}],
        [{"b": 1}],
        [{"a": 1}, {"a": 2}],
        [{"a": 2}, {"a": 1}],
        [{"a": arrays[0]}],
        [{"a": arrays[1]}],
    ]
    assert len({describe_rows(rows) for rows in changed}) == len(changed)
