"""Rows hold the values that a Parquet file has, in its own types. Expected values are written by hand."""

import datetime
import decimal
import math
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rlflow.errors import RecipeError
from tests.unit.data.test_text_files import rows_of

UTC = datetime.UTC
MESSAGE = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
# The type of a column, and the values of it, which follow a null.
COLUMNS: dict[str, tuple[Any, Any]] = {
    "int8": (pyarrow.int8(), -128),
    "int32": (pyarrow.int32(), 7),
    "int64": (pyarrow.int64(), 2**63 - 1),
    "beyond 2^53": (pyarrow.int64(), 2**53 + 1),
    "uint64": (pyarrow.uint64(), 2**64 - 1),
    "float16": (pyarrow.float16(), 0.5),
    "float32": (pyarrow.float32(), 0.25),
    "float64": (pyarrow.float64(), 1e-05),
    "whole float64": (pyarrow.float64(), 3.0),
    "infinity": (pyarrow.float64(), math.inf),
    "bool": (pyarrow.bool_(), True),
    "string": (pyarrow.string(), "007"),
    "empty string": (pyarrow.string(), ""),
    "date as string": (pyarrow.string(), "2024-01-02"),
    "unicode": (pyarrow.string(), "\U0001f600\n\u2028"),
    "large_string": (pyarrow.large_string(), "NA"),
    "string_view": (pyarrow.string_view(), "null"),
    "binary": (pyarrow.binary(), b"\xff\x00"),
    "large_binary": (pyarrow.large_binary(), b"\xff"),
    "binary of a fixed size": (pyarrow.binary(2), b"ab"),
    "decimal128": (pyarrow.decimal128(38, 2), decimal.Decimal("123456789012345678901234567890.10")),
    "decimal256": (pyarrow.decimal256(50, 1), decimal.Decimal("1.0")),
    "date32": (pyarrow.date32(), datetime.date(2024, 1, 2)),
    "date64": (pyarrow.date64(), datetime.date(2024, 1, 2)),
    "timestamp": (pyarrow.timestamp("us"), datetime.datetime(2024, 1, 2, 3, 4, 5, 6)),
    "timestamp of a zone": (pyarrow.timestamp("ms", tz="UTC"), datetime.datetime(2024, 1, 2, tzinfo=UTC)),
    "time32": (pyarrow.time32("s"), datetime.time(3, 4, 5)),
    "time64": (pyarrow.time64("us"), datetime.time(3, 4, 5, 6)),
    "duration": (pyarrow.duration("s"), datetime.timedelta(seconds=5)),
    "null": (pyarrow.null(), None),
    "list": (pyarrow.list_(pyarrow.int64()), [1, None]),
    "empty list": (pyarrow.list_(pyarrow.int64()), []),
    "large_list": (pyarrow.large_list(pyarrow.string()), ["1"]),
    "list of a fixed size": (pyarrow.list_(pyarrow.int64(), 2), [1, 2]),
    "struct": (pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.string())]), {"a": 1, "b": None}),
    "messages": (pyarrow.list_(MESSAGE), [{"role": "user", "content": "1"}]),
    "dictionary": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), "x"),
}


def test_rows_hold_the_values_of_the_file(tmp_path: Path) -> None:
    columns = {name: pyarrow.array([None, value], kind) for name, (kind, value) in COLUMNS.items()}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    empty, row = rows_of(tmp_path / "a.parquet")
    assert empty == dict.fromkeys(COLUMNS)
    for name, (_, value) in COLUMNS.items():
        assert row[name] == value, name
        assert type(row[name]) is type(value), name


def test_a_timestamp_keeps_its_nanoseconds(tmp_path: Path) -> None:
    columns = {"a": pyarrow.array([1704164645000000001], pyarrow.timestamp("ns"))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert str(rows_of(tmp_path / "a.parquet")[0]["a"]) == "2024-01-02 03:04:05.000000001"


@pytest.mark.parametrize(
    "kind", [pyarrow.map_(pyarrow.string(), pyarrow.int64()), pyarrow.list_(pyarrow.map_(MESSAGE, pyarrow.int64()))]
)
@pytest.mark.parametrize("name", ["a.parquet", "folder/train.parquet"])
def test_a_column_of_another_type_is_named(name: str, kind: Any, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table({"a": ["1"], "b": pyarrow.array([None], kind)}), path)
    with pytest.raises(RecipeError, match=r"data\.source: the column 'b' of '.*\.parquet' has the type .*map<"):
        rows_of(path.parent if path.parent != tmp_path else path)


def test_a_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    binary = pyarrow.array([b"1", b"2", b"\xff"])
    texts = binary.cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"a": ["1"] * 3, "b": binary, "c": texts}), tmp_path / "a.parquet")
    with pytest.raises(RecipeError, match=r"^data\.source: row 2 of '.*' is not UTF-8 in 'c' \(byte 0xff\)"):
        rows_of(tmp_path / "a.parquet")
