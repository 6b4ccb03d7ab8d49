"""Mixtures of data sets: how many rows of each there are, and errors that name the part."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlflow.data.loading import load_rows
from rlflow.errors import RecipeError
from tests.unit.data.test_source import data, write

SUMS = {"source": "rlflow.data.arithmetic:additions", "options": {"digits": 1}}


def mixed(parts: dict[str, Any], split: Any = "split", **options: Any) -> list[Any]:
    source = data("rlflow.data.mixture:mix", options={"parts": parts, **options}, eval_split="test")
    return list(load_rows(source, split))


def test_rows_are_in_proportion_to_weights(tmp_path: Path) -> None:
    """The file has four rows, of which each is used equally often, and the sums have more than are needed."""
    file = write(tmp_path / "rows.jsonl", [{"question": f"{number}+0=", "answer": str(number)} for number in range(4)])
    parts = {
        "file": {"source": str(file), "columns": {"prompt": "question"}, "weight": 3},
        "sums": SUMS,
        "unused": {**SUMS, "weight": 0},
    }
    rows = mixed(parts, rows=32)
    assert Counter(row["source"] for row in rows) == {"file": 24, "sums": 8}
    assert set(Counter(row["prompt"] for row in rows if row["source"] == "file").values()) == {6}
    assert len({row["prompt"] for row in rows if row["source"] == "sums"}) == 8
    assert {row["source"] for row in rows[:10]} == {"file", "sums"}
    assert rows == mixed(parts, rows=32) != mixed(parts, rows=32, seed=1)


def test_splits_are_those_of_the_parts() -> None:
    swapped = {**SUMS, "splits": {"train": "test", "test": "train"}}
    assert len(mixed({"sums": swapped})) == len(mixed({"sums": SUMS}, "eval_split"))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"source": "nowhere.jsonl"}, r"^data\.options\.parts\.math\.source: "),
        ({**SUMS, "columns": {"prompt": "question"}}, r"^data\.options\.parts\.math\.columns\.prompt: no column"),
        ({**SUMS, "wieght": 2}, r"^data\.options\.parts\.math\.wieght: unknown key"),
        ({**SUMS, "weight": 0}, r"^data\.options\.parts: no part has a weight"),
    ],
)
def test_errors_name_the_part(part: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        mixed({"math": part})
