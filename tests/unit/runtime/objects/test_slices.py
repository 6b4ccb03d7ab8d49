"""The slices of a block that another host cuts out, here in this process."""

import weakref
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from rlflow.batch import Logprobs, Sequences
from rlflow.errors import EngineError
from rlflow.runtime.objects import slices, store
from rlflow.runtime.objects.slices import HostSlice, Slicer, localize
from rlflow.runtime.objects.store import RowSpans, StoredColumn, block_for

LENGTHS = np.array([3, 0, 2, 4, 1])
STARTS = np.cumsum(LENGTHS) - LENGTHS


class Reference(str):
    """A reference to an object in the store, by name."""

    def hex(self) -> str:
        return str(self)


class Elsewhere:
    """The objects of other hosts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.objects: dict[Any, Any] = {}
        self.fetched: list[Any] = []
        self.cut: list[Any] = []
        self.error: Exception | None = None
        self.killed: list[Any] = []
        cutter = SimpleNamespace(cut=SimpleNamespace(remote=lambda *arguments: arguments))
        self._cutter = Slicer()
        monkeypatch.setattr(slices, "_slicer_on", cache(lambda host: cutter))
        monkeypatch.setattr(slices, "_MIN_SAVED_BYTES", 1)
        monkeypatch.setattr(
            slices,
            "import_ray",
            lambda: SimpleNamespace(get=self._get, put=self._put, kill=self.killed.append, exceptions=ray.exceptions),
        )
        monkeypatch.setattr(store, "_BLOCKS", type(store._BLOCKS)())
        monkeypatch.setattr(store, "fetch", self._fetch)

    def block(self, host: str, first: int) -> Any:
        reference = Reference(f"{host} {first}")
        self.objects[reference] = np.arange(first, first + LENGTHS.sum(), dtype=np.int32)
        return block_for(reference, host, int(LENGTHS.sum()), "<i4")

    def _fetch(self, reference: Any) -> Any:
        self.fetched.append(reference)
        return self.objects[reference]

    def _put(self, values: Any) -> str:
        self.cut.append([len(each) for each in values])
        self.objects[f"cut {len(self.cut)}"] = values
        return f"cut {len(self.cut)}"

    def _get(self, asked: Any, timeout: float | None = None) -> Any:
        if isinstance(asked, list):
            return [self.objects[each] for each in asked]
        if isinstance(asked, str):
            return self.objects[asked]
        if self.error:
            raise self.error
        return self._cutter.cut(*asked)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    return Elsewhere(monkeypatch)


def column(elsewhere: Elsewhere, rows: list[int], least: int = 0) -> StoredColumn:
    """Return a column with rows 0 to 4 here and the others on two hosts. ``least`` is the smallest value of all."""
    blocks = [elsewhere.block(host, least + first) for host, first in (("here", 0), ("b", 100), ("c", 200))]
    spans = RowSpans(np.repeat([0, 1, 2], 5), np.tile(STARTS, 3), np.tile(LENGTHS, 3))
    return StoredColumn(blocks, spans).take(np.array(rows, np.int64))


def values_of(batch: Logprobs) -> list[int]:
    found: list[int] = batch.values.values.tolist()
    return found


def test_only_rows_that_are_read_are_fetched(elsewhere: Elsewhere) -> None:
    whole = Logprobs(values=column(elsewhere, [0, 5, 8, 7, 13, 5]))
    read = localize(whole, "here")
    assert values_of(read) == [0, 1, 2, 100, 101, 102, 105, 106, 107, 108, 103, 104, 205, 206, 207, 208, 100, 101, 102]
    assert elsewhere.fetched == ["here 0"]
    assert elsewhere.cut == [[9], [4]], "one message for each host"
    assert values_of(read.take(np.array([2, 4]))) == [105, 106, 107, 108, 205, 206, 207, 208]
    assert len(elsewhere.cut) == 2, "what was cut out serves all that is taken of it"


@given(st.lists(st.integers(0, 14), max_size=12), st.data())
def test_any_rows_are_the_same(rows: list[int], draw: Any) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        elsewhere = Elsewhere(monkeypatch)
        plain = Logprobs(values=column(elsewhere, rows))
        read = localize(plain, "here")
        taken = draw.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
        for picked in (np.arange(len(rows)), np.array(taken, np.int64)):
            assert values_of(read.take(picked)) == values_of(plain.take(picked))


def test_ranks_that_share_sequences_share_a_slice(elsewhere: Elsewhere) -> None:
    whole = Logprobs(values=column(elsewhere, [5, 8]))
    assert values_of(localize(whole, "here")) == values_of(localize(whole, "d"))
    assert len(elsewhere.cut) == 1


def test_a_block_of_which_all_is_read_comes_whole(elsewhere: Elsewhere) -> None:
    read = localize(Logprobs(values=column(elsewhere, [9, 8, 7, 5])), "here")
    assert len(values_of(read)) == 10
    assert elsewhere.cut == []
    assert elsewhere.fetched == ["b 100"]


def test_all_columns_come_in_one_message_from_each_host(elsewhere: Elsewhere) -> None:
    prompts, responses = column(elsewhere, [9, 5, 10], 1000), column(elsewhere, [5, 8, 13])
    read = localize(Sequences(keys=np.zeros((3, 3), np.int64), prompt_ids=prompts, response_ids=responses), "here")
    assert read.response_ids.values.tolist() == [100, 101, 102, 105, 106, 107, 108, 205, 206, 207, 208]
    assert read.prompt_ids.values.tolist() == [1109, 1100, 1101, 1102, 1200, 1201, 1202]
    assert elsewhere.cut == [[4, 7], [3, 4]], "in each message the prompts and the responses"


def test_columns_that_are_not_read_are_not_fetched(elsewhere: Elsewhere) -> None:
    read = localize(Logprobs(values=column(elsewhere, [5, 10])), "here")
    assert read.values.lengths.tolist() == [3, 3]
    assert not elsewhere.cut
    assert not elsewhere.fetched


@pytest.mark.parametrize("error", [ray.exceptions.RayActorError(), ray.exceptions.GetTimeoutError()])
def test_without_a_slicer_the_complete_block_is_fetched(elsewhere: Elsewhere, error: Exception) -> None:
    elsewhere.error = error
    read = localize(Logprobs(values=column(elsewhere, [5, 0])), "here")
    assert values_of(read) == [100, 101, 102, 0, 1, 2]
    assert elsewhere.fetched == ["here 0", "b 100"]
    # One that is stopped would keep its name.
    assert len(elsewhere.killed) == isinstance(error, ray.exceptions.GetTimeoutError)


def test_only_the_slicer_that_was_asked_is_killed(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reader may have started a new one meanwhile."""
    elsewhere.error = ray.exceptions.GetTimeoutError()
    asked = slices._slicer_on("b")
    source = HostSlice("b")
    source.add(elsewhere.block("b", 100), (np.array([0]), np.array([3])))
    source.request()
    monkeypatch.setattr(slices, "_slicer_on", cache(lambda host: SimpleNamespace()))
    assert source.values is None
    assert elsewhere.killed == [asked]


@pytest.mark.parametrize("error", [ray.exceptions.RaySystemError("no Ray"), ValueError("the name is taken")])
def test_the_complete_block_is_fetched_when_no_slicer_starts(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def start(host: str) -> Any:
        raise error

    monkeypatch.setattr(slices, "_slicer_on", start)
    assert values_of(localize(Logprobs(values=column(elsewhere, [5, 0])), "here")) == [100, 101, 102, 0, 1, 2]
    assert elsewhere.fetched == ["here 0", "b 100"]


def test_a_slicer_does_not_keep_the_block(elsewhere: Elsewhere) -> None:
    reference = Reference("b 100")
    elsewhere.objects["b 100"] = np.arange(10)
    cutter, intervals = Slicer(), [(np.array([2]), np.array([4]))]
    assert cutter.cut([reference], [0], intervals) == cutter.cut([Reference("b 100")], [0], intervals)
    assert len(elsewhere.cut) == 1
    held = weakref.ref(reference)
    del reference
    assert held() is None


def test_rows_beyond_the_end(elsewhere: Elsewhere) -> None:
    spans = RowSpans(np.array([0]), np.array([8]), np.array([5]))
    read = localize(Logprobs(values=StoredColumn([elsewhere.block("b", 100)], spans)), "here")
    with pytest.raises(EngineError, match="reach beyond the end of their block"):
        values_of(read)
