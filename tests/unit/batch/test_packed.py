"""Rows in one array, whichever way it is held."""

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Batch, Minibatch, Prompts, Rollouts, Sequences
from rlflow.batch.packed import Packed, Records, Repeated, compress, decompress
from tests.helpers import minibatch, prompts, rollouts, sequences

LENGTHS = np.array([2, 0, 3])
KINDS = {
    "packed": Packed.from_rows([[1, 2], [], [3, 4, 5]], np.int32),
    "repeated": Repeated(np.array([7.0, 8.0, 9.0], np.float32), LENGTHS),
    "spans": Repeated(np.array([7.0, 8.0, 9.0], np.float32), np.array([2, 1, 2]), np.array([1, 0, 2])),
}


def rows_of(column: Packed) -> list[list[float]]:
    return [column[row].tolist() for row in range(len(column))]


@pytest.mark.parametrize("kind", KINDS)
class TestKinds:
    def test_rows_are_what_values_and_offsets_say(self, kind: str) -> None:
        column = KINDS[kind]
        assert (column.lengths == LENGTHS).all()
        ends = column.offsets.tolist()
        assert rows_of(column) == [column.values[a:b].tolist() for a, b in itertools.pairwise(ends)]
        assert len(column.values) == ends[-1]

    @pytest.mark.parametrize("rows", [[2, 0], [0, 0, 1], []])
    def test_take_returns_the_rows(self, kind: str, rows: list[int]) -> None:
        taken = KINDS[kind].take(np.array(rows, np.int64))
        assert rows_of(taken) == [rows_of(KINDS[kind])[row] for row in rows]
        assert taken.values.dtype == KINDS[kind].values.dtype

    def test_parts_are_joined(self, kind: str) -> None:
        column = KINDS[kind]
        assert rows_of(Packed.concatenate([column, column.take(np.array([2]))])) == [
            *rows_of(column),
            rows_of(column)[2],
        ]
        assert type(Packed.concatenate([column, column])) is type(column)

    def test_it_is_the_same_in_another_process(self, kind: str) -> None:
        again = pickle.loads(pickle.dumps(KINDS[kind]))
        assert rows_of(again) == rows_of(KINDS[kind])
        assert again.values.dtype == KINDS[kind].values.dtype


@pytest.mark.parametrize("rows", [[[7, 7], [], [9, 9, 8]], [[1], [1], [1, 1]], [[], []], [], [[1, 2], [2, 1]]])
def test_repeated_values_are_stored_once(rows: list[list[int]]) -> None:
    column = Repeated.from_packed(Packed.from_rows(rows, np.int32))
    assert rows_of(column) == rows
    assert len(column.run_values) == sum(len(list(itertools.groupby(row))) for row in rows)


def test_rows_of_one_value_and_of_several() -> None:
    whole = Packed.concatenate([KINDS["repeated"], KINDS["spans"]])
    assert isinstance(whole, Repeated)
    assert rows_of(whole) == rows_of(KINDS["repeated"]) + rows_of(KINDS["spans"])


def test_kinds_are_joined_as_values() -> None:
    whole = Packed.concatenate([KINDS["repeated"], Packed.from_rows([[1.5]], np.float32)])
    assert rows_of(whole) == [[7, 7], [], [9, 9, 9], [1.5]]


@pytest.mark.parametrize("items", [("a", "", "déjà"), ({"answer": "1", "n": None}, {"answer": [2]}), ()])
def test_records_are_the_given_rows(items: Sequence[Any]) -> None:
    records = Records.from_items(items)
    assert tuple(records) == items
    assert len(records) == len(items)
    assert tuple(records.take(np.arange(len(items))[::-1])) == items[::-1]
    assert tuple(Records.concatenate([records, records])) == (*items, *items)
    assert records[:2] == list(items[:2])
    with pytest.raises(IndexError):
        records[len(items)]


@pytest.mark.parametrize(
    "values",
    [
        np.array([[5, 0, 1], [5, 0, 2], [5, 70000, 3]], np.int64),
        np.array([0, -1, 2**40]),
        np.array([-(2**62), 2**62]),
        np.array([], np.int64),
        np.array([0.1, np.inf], np.float32),
        np.array([True, False]),
    ],
)
def test_compact_loses_nothing(values: Any) -> None:
    again = decompress(compress(values))
    assert again.dtype == values.dtype
    assert again.tolist() == values.tolist()
    assert again.flags.writeable


def test_keys_of_a_step_take_next_to_no_bytes() -> None:
    keys = np.array([[3, prompt, sample] for prompt in range(512) for sample in range(32)], np.int64)
    assert len(compress(keys).content) < len(keys) * 0.2


def batches() -> dict[str, Batch]:
    of = sequences([3, 2], [[4, 1], [2]])
    return {
        "prompts": prompts(),
        "rollouts": rollouts(of, ["a", "b", "c"]),
        "minibatch": minibatch(of, advantages=np.arange(7)),
    }


def told(value: Any) -> Any:
    if isinstance(value, Packed):
        return rows_of(value)
    if isinstance(value, dict):
        return {name: told(column) for name, column in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else list(value) if isinstance(value, Sequence) else value


@pytest.mark.parametrize("kind", ["prompts", "rollouts", "minibatch"])
def test_every_field_of_a_batch_is_taken_concatenated_and_sent(kind: str) -> None:
    whole = batches()[kind]
    pieces = [whole.take(np.array([row])) for row in range(len(whole))]
    for again in (
        type(whole).concatenate(pieces),
        pickle.loads(pickle.dumps(whole)),
        whole.map_packed(lambda column: column),
    ):
        assert type(again) is type(whole)
        assert {n: told(v) for n, v in vars(again).items()} == {n: told(v) for n, v in vars(whole).items()}


def test_a_subclass_keeps_its_fields_and_converts_to_sequences() -> None:
    of = batches()["minibatch"]
    assert isinstance(of, Minibatch)
    assert of.take(np.array([0])).columns["advantages"].lengths.tolist() == [4]
    assert type(of.as_sequences()) is Sequences


def test_repeating_counts_on_from_the_samples_that_are_there() -> None:
    repeated = prompts((2, 3)).repeat(2)
    assert repeated.keys.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    fifth = Prompts(keys=np.array([[0, 1, 5]]), ids=repeated.ids.take(np.array([2])), rows=repeated.rows[2:3])
    assert fifth.repeat(1).keys.tolist() == [[0, 1, 5]]
    assert fifth.keys.tolist() == [[0, 1, 5]]


def test_rollouts_keep_one_temperature() -> None:
    whole = batches()["rollouts"]
    assert isinstance(whole, Rollouts)
    assert Rollouts.concatenate([whole, whole]).temperature == 1.0
