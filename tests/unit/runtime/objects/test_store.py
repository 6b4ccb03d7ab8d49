"""Columns in the store, which is a dictionary here."""

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Image, Logprobs, Packed, Prompts, Repeated, Rewards, images_of, pack_images
from rlflow.errors import EngineError
from rlflow.runtime.objects import results, store
from rlflow.runtime.objects.results import put_batch
from rlflow.runtime.objects.slices import SharedBatch, SliceMessage, open_message
from rlflow.runtime.objects.store import Block, StoredColumn, blocks_of
from tests.helpers import rollouts, sequences


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Return the objects in the store, by reference."""
    held: dict[int, Any] = {}

    def put(values: Any) -> Block:
        held[len(held)] = values
        return store.block_for(len(held) - 1, "h", len(values), values.dtype.str)

    monkeypatch.setattr(store, "_BLOCKS", type(store._BLOCKS)())
    monkeypatch.setattr(store, "fetch", held.__getitem__)
    monkeypatch.setattr(results, "put_array", put)
    monkeypatch.setattr(store, "put_array", put)
    return held


def rows_of(column: Packed) -> list[list[Any]]:
    return [column[row].tolist() for row in range(len(column))]


@pytest.fixture
def written() -> Any:
    """Return six rollouts whose rows are all different."""
    of = rollouts(sequences([3, 2], [[4, 1, 3], [2, 5, 1]]), list("abcdef"))
    count = len(of.response_ids.values)
    ids, logprobs = (of.response_ids.like(np.arange(count, dtype=kind)) for kind in (np.int32, np.float32))
    versions = Repeated(np.arange(6, dtype=np.int32), of.response_ids.lengths)
    return replace(of, response_ids=ids, logprobs=logprobs, versions=versions)


def test_an_object_a_field(objects: dict[int, Any], written: Any) -> None:
    out = put_batch(written)
    assert len(objects) == 5  # prompts, responses, logprobs, texts, rows; versions are one a row
    for name in ("prompt_ids", "response_ids", "logprobs", "versions"):
        assert rows_of(getattr(out, name)) == rows_of(getattr(written, name)), name
    assert list(out.texts) == list("abcdef")
    assert list(out.rows) == [{"answer": "1"}] * 6
    assert blocks_of(put_batch(out)) == blocks_of(out), "what is in the store already stays there"
    assert len(objects) == 5


@pytest.mark.usefixtures("objects")
@pytest.mark.parametrize("rows", [[3, 0, 5], [1, 1, 2], [2, 3, 4], []])
def test_rows_of_several_producers(written: Any, rows: list[int]) -> None:
    whole = type(written).concatenate([put_batch(written.take(np.array(part))) for part in ([0, 1], [2], [3, 4, 5])])
    taken = whole.take(np.array(rows, np.int64))
    for name in ("prompt_ids", "response_ids", "logprobs", "versions"):
        column, expected = getattr(taken, name), getattr(written, name)
        assert isinstance(column, Repeated if name == "versions" else StoredColumn)
        assert rows_of(column) == [expected[row].tolist() for row in rows]
        assert column.values.tolist() == [value for row in rows for value in expected[row]]
        assert column.values.dtype == expected.values.dtype
        assert (column.offsets == expected.take(np.array(rows, np.int64)).offsets).all()
        assert column.values.flags.writeable
    assert list(taken.texts) == ["abcdef"[row] for row in rows]


@pytest.mark.usefixtures("objects")
def test_rows_at_other_places_and_empty_ones_between(written: Any) -> None:
    spread = put_batch(written).logprobs.take(np.array([4, 1])).spread(np.array([1, 3]), 5)
    assert isinstance(spread, StoredColumn)
    expected = [[], written.logprobs[4].tolist(), [], written.logprobs[1].tolist(), []]
    assert rows_of(spread) == rows_of(pickle.loads(pickle.dumps(spread))) == expected
    assert spread.values.tolist() == [value for row in expected for value in row]


@pytest.mark.usefixtures("objects")
def test_columns_that_are_cut_alike_travel_once(written: Any) -> None:
    whole = type(written).concatenate([put_batch(written.take(np.array(part))) for part in ([0, 1], [2, 3, 4, 5])])
    for batch in (whole, whole.take(np.array([4, 2])), pickle.loads(pickle.dumps(whole))):
        assert batch.logprobs.spans is batch.response_ids.spans
    again = pickle.loads(pickle.dumps(whole.take(np.array([5, 0]))))
    assert rows_of(again.logprobs) == [rows_of(written.logprobs)[row] for row in (5, 0)]
    assert again.logprobs.blocks[0] is whole.logprobs.blocks[0], "there is one of each block in a process"


def test_a_thousand_rollouts_in_a_message(objects: dict[int, Any]) -> None:
    """Ray's references aside, which are numbers here: 10 bytes each or less."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 100, (250, 4))
    parts = np.array_split(np.arange(1000), 4)
    whole = rollouts(sequences(list(draw.integers(1, 40, 250)), [list(group) for group in lengths]))
    joined = type(whole).concatenate([put_batch(whole.take(part)) for part in parts])
    assert len(pickle.dumps(joined)) < 10_000
    assert len(objects) == 20


def test_only_blocks_that_are_asked_for_are_fetched(objects: dict[int, Any], written: Any) -> None:
    whole = type(written).concatenate([put_batch(written.take(np.array(part))) for part in ([0, 1], [2, 3, 4, 5])])
    objects.clear()
    assert whole.take(np.array([0, 4])).response_ids.lengths.tolist() == [4, 5]
    with pytest.raises(KeyError):
        _ = whole.take(np.array([0])).response_ids.values


def test_columns_are_stored_in_their_declared_type(objects: dict[int, Any], written: Any) -> None:
    """Whatever an engine gives, what several of them have made can be joined without its values."""
    count = len(written.versions.values)
    changing = written.versions.like(np.arange(count, dtype=np.int32) // 3)
    same = Repeated(np.zeros(len(written), np.float32), written.response_ids.lengths)
    parts = [put_batch(each) for each in (written, replace(written, versions=changing, logprobs=same))]
    out = type(written).concatenate(parts)
    assert isinstance(out.versions, Repeated)
    assert isinstance(out.logprobs, StoredColumn)
    assert out.versions.values.tolist() == written.versions.values.tolist() + changing.values.tolist()
    assert rows_of(out.logprobs) == rows_of(written.logprobs) + rows_of(same)
    assert sum(block.nbytes for block in blocks_of(out)) == sum(values.nbytes for values in objects.values())


def test_segments_travel_with_the_batch(objects: dict[int, Any], written: Any) -> None:
    """The columns of segments may be missing, and are runs where they are not."""
    numbers = Repeated(np.zeros(len(written), np.int32), written.response_ids.lengths)
    out = put_batch(replace(written, response_segments=numbers, prompt_segments=None))
    assert (type(out.response_segments), out.prompt_segments) == (Repeated, None)


def test_a_batch_without_columns_stays_as_it_is(objects: dict[int, Any]) -> None:
    rewards = Rewards(values=np.ones(2, np.float32))
    assert put_batch(rewards).values is rewards.values
    assert objects == {}


class TestBadData:
    def test_a_block_that_is_not_as_announced(self, objects: dict[int, Any], written: Any) -> None:
        out = put_batch(written)
        values = objects[1]
        for wrong, said in ((values[:-1], r"int32 of \(15,\)"), (values.astype(np.int64), "int64"), ("text", "str")):
            objects[1] = wrong
            fresh = pickle.loads(pickle.dumps(out))
            for block in fresh.response_ids.blocks:
                vars(block).pop("values", None)
            with pytest.raises(EngineError, match=rf"object store: expected a block of 16 values of int32, got {said}"):
                _ = fresh.response_ids.values

    def test_rows_beyond_the_end(self, objects: dict[int, Any]) -> None:
        column = StoredColumn.of(store.put_array(np.arange(4)), np.array([2, 3]))
        with pytest.raises(EngineError, match="reach beyond the end of their block"):
            _ = column.values
        assert objects

    def test_columns_that_do_not_fit_each_other(self, objects: dict[int, Any], written: Any) -> None:
        short = written.logprobs.take(np.array([0, 1, 2, 3, 4, 4]))
        with pytest.raises(EngineError, match="logprobs: row 5 has 1 tokens and 5 values"):
            put_batch(replace(written, logprobs=short))
        with pytest.raises(EngineError, match="versions: expected 6 rows, got 2"):
            put_batch(replace(written, versions=written.versions.take(np.array([0, 1]))))
        for name in ("logprobs", "versions"):
            column = getattr(written, name)
            broken = Packed(column.values[:-1], column.offsets)
            with pytest.raises(EngineError, match="a column has 15 values, and its rows need 16"):
                put_batch(replace(written, **{name: broken}))
        with pytest.raises(EngineError, match=r"texts: expected 6 rows, got 1"):
            put_batch(replace(written, texts=("a",)))
        assert objects == {}


def test_a_part_of_a_batch(objects: dict[int, Any], written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SharedBatch(written)
    monkeypatch.setattr("rlflow.runtime.objects.slices.fetch", objects.__getitem__)
    monkeypatch.setattr("rlflow.runtime.objects.slices.this_host", lambda: "h")
    objects[99] = pickle.loads(pickle.dumps(written))
    vars(whole)["reference"] = 99
    part = whole.slice(np.array([4, 1]))
    sent = pickle.loads(pickle.dumps(part.to_message()))
    assert isinstance(sent, SliceMessage)
    arrived: Any = open_message(sent)
    expected: Any = part.batch
    assert rows_of(arrived.response_ids) == rows_of(expected.response_ids)
    assert open_message("text") == "text"


def test_scores_have_a_batch_of_their_own(objects: dict[int, Any], written: Any) -> None:
    out = put_batch(Logprobs(values=written.logprobs))
    assert len(out) == 6
    assert len(objects) == 1


def test_a_column_knows_whether_its_values_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that puts values says so, and it travels with the column; integers always are."""
    ray = SimpleNamespace(put=lambda values: object())
    monkeypatch.setattr(store, "import_ray", lambda: ray)
    monkeypatch.setattr(store, "this_host", lambda: "h")
    good, bad, ids = (
        StoredColumn.of(store.put_array(np.array(values)), np.array([1, 2]))
        for values in ([0.0, 1.0, 2.0], [0.0, np.inf, 2.0], [0, 1, 2])
    )
    assert (good.is_finite, bad.is_finite, ids.is_finite) == (True, False, True)
    assert not bad.take(np.array([1])).is_finite
    restore, arguments = bad.blocks[0].__reduce__()
    assert not restore(*arguments).is_finite
    assert not Packed.concatenate([good, bad]).is_finite


def prompts_with_images() -> Prompts:
    """Return three prompts with 1, 2 and 0 images of 1,000 bytes."""
    images = [[Image(bytes([number]) * 1000, 4, number) for number in range(count)] for count in (1, 2, 0)]
    ids = Packed.from_rows([[1]] * 3, np.int32)
    return Prompts(keys=np.arange(9).reshape(3, 3), ids=ids, rows=({},) * 3, images=pack_images(images))


def test_images_are_put_once(objects: dict[int, Any]) -> None:
    prompts = prompts_with_images()
    stored = put_batch(prompts.repeat(8)).images
    assert prompts.images is not None
    assert stored is not None
    assert [held.nbytes for held in objects.values() if held.nbytes >= 1000] == [prompts.images.values.nbytes]
    assert prompts.images.values.nbytes < 1.05 * 3000
    assert [images_of(stored, row) for row in range(24)] == [images_of(prompts.images, row // 8) for row in range(24)]


@pytest.mark.usefixtures("objects")
def test_results_refer_to_no_block_that_they_do_not_need(written: Any) -> None:
    columns = [put_batch(prompts_with_images().take(np.zeros(6, np.int64))).images for _ in range(2)]
    joined = type(written).concatenate([replace(written, images=column) for column in columns])
    later = put_batch(joined.take(np.arange(6, 12))).images
    assert later.blocks == columns[1].blocks  # type: ignore[union-attr]
