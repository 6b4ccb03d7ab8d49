"""Rows hold the values that a JSON or CSV file has. Expected values are written by hand, beside the file's text."""

import gzip
import math
from pathlib import Path
from typing import Any

import pytest

from rlflow.data.files import read_files_or_hub
from rlflow.data.text_files import read_text_files
from rlflow.errors import RecipeError
from rlflow.recipe import Data

# The text of a value in a file, and the value.
VALUES: dict[str, Any] = {
    '"2024-01-02"': "2024-01-02",
    '"2024-01-02T03:04:05Z"': "2024-01-02T03:04:05Z",
    '"03:04"': "03:04",
    "3": 3,
    "3.0": 3.0,
    "-0": 0,
    '"3"': "3",
    '"007"': "007",
    '"1e5"': "1e5",
    "1e5": 1e5,
    "1e-05": 1e-05,
    "0.1": 0.1,
    "18446744073709551616": 2**64,
    "-9223372036854775809": -(2**63) - 1,
    "123456789012345678901234567890": 123456789012345678901234567890,
    "true": True,
    '"true"': "true",
    "null": None,
    '"null"': "null",
    '"NaN"': "NaN",
    '"NA"': "NA",
    '""': "",
    '" 4 "': " 4 ",
    '"a\\nb"': "a\nb",
    '"\\u2028"': "\u2028",
    '"\\ud83d\\ude00"': "\U0001f600",
    "[]": [],
    "{}": {},
    "Infinity": math.inf,
    "-Infinity": -math.inf,
    "9007199254740993": 2**53 + 1,
    "5e-324": 5e-324,
    '"\\u0000"': "\0",
    '"\ufeff"': "\ufeff",
    '"+1"': "+1",
    '"1_000"': "1_000",
    '"\u00e9"': "\u00e9",
    '[1, "1", 1.5, null]': [1, "1", 1.5, None],
    '{"a": 1}': {"a": 1},
    '{"b": [{"c": "2024-01-02"}]}': {"b": [{"c": "2024-01-02"}]},
}


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = read_files_or_hub(Data(source=str(path), batch_size=1, max_prompt_tokens=8), "split", "train")
    return [dict(row) for row in rows]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "folder/train.jsonl"])
def test_rows_hold_the_values_of_the_file_whatever_the_other_rows_have(name: str, tmp_path: Path) -> None:
    lines = [f'{{"value": {text}}}' for text in VALUES]
    text = f"[{', '.join(lines)}]" if name == "a.json" else "\n".join(lines)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    rows = rows_of(path.parent if path.parent != tmp_path else path)
    for row, (text, value) in zip(rows, VALUES.items(), strict=True):
        assert row == {"value": value}, text
        assert type(row["value"]) is type(value), text


def test_a_column_that_a_row_leaves_out_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": {"x": 1}}\r\n\r\n{"b": 2, "a": {"y": 2}}\r\n')
    assert rows_of(path) == [{"a": {"x": 1}, "b": None}, {"a": {"y": 2}, "b": 2}]


def test_a_number_that_is_none_stays_itself(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": NaN}\n')
    assert math.isnan(rows_of(tmp_path / "a.jsonl")[0]["a"])


def test_objects_of_several_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{\n "a": 1\n}\n{"a": 2}')
    assert rows_of(path) == [{"a": 1}, {"a": 2}]


# A cell of a CSV file, and its text.
CELLS = {
    "007": "007",
    "1e5": "1e5",
    "3.0": "3.0",
    "9007199254740993": "9007199254740993",
    "2024-01-02": "2024-01-02",
    "true": "true",
    "NA": "NA",
    "null": "null",
    "nan": "nan",
    "": "",
    '""': "",
    " 4 ": " 4 ",
    '"1, 2"': "1, 2",
    '"a\nb"': "a\nb",
    '"a\r\nb"': "a\r\nb",
    '"say ""hi"""': 'say "hi"',
    "[1, 2]".replace(", ", ";"): "[1;2]",
    "\u00e9": "\u00e9",
    "x" * 200_000: "x" * 200_000,
}


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "folder/train.csv", "a.tsv"])
def test_the_cells_of_a_csv_file_are_texts(name: str, tmp_path: Path) -> None:
    separator = "\t" if name == "a.tsv" else ","
    lines = [f"value{separator}other", *(f"{cell}{separator}1" for cell in CELLS), "", ""]
    content = b"\xef\xbb\xbf" + "\r\n".join(lines).encode()
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    rows = rows_of(path.parent if path.parent != tmp_path else path)
    assert rows == [{"value": text, "other": "1"} for text in CELLS.values()]


def test_parts_of_splits(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"a": {n}}}\n' for n in range(4)))
    (tmp_path / "test.jsonl").write_text("".join(f'{{"a": {n}}}\n' for n in range(4, 6)))
    data = Data(source=str(tmp_path), batch_size=1, max_prompt_tokens=8)
    for split, numbers in {"train[:50%]": [0, 1], "train[-1:]+test": [3, 4, 5], "test": [4, 5]}.items():
        assert [row["a"] for row in read_files_or_hub(data, "split", split)] == numbers, split


# The content of a file, and a part of the error, which names the place.
MISTAKES = {
    "a.jsonl": [
        (b'{"a": 1}\n{"a": 2', "line 2 of 'a.jsonl' is not JSON (Expecting ',' delimiter, column 8)"),
        (b'{"a": 1}\n[1]\n', "line 2 of 'a.jsonl': expected an object, got a list"),
        (b'{"a": 1, "a": 2}\n', "line 1 of 'a.jsonl': the key 'a' occurs twice"),
        (b'{"a": {"b": 1, "b": 2}}\n', "line 1 of 'a.jsonl': the key 'b' occurs twice"),
        (b'{"b": 1, "a": ["\\ud800"]}\n', "line 1 of 'a.jsonl': the column 'a' has half of a surrogate pair"),
        (b'{"a": 1,}\n', "line 1 of 'a.jsonl' is not JSON (Expecting property name"),
        (b'{"a": 1} {"a": 2}\n', "line 1 of 'a.jsonl' is not JSON (Extra data, column 10)"),
        (b'{"a": "\xff"}\n', "line 1 of 'a.jsonl' is not UTF-8 (byte 0xff, column 8)"),
        (b'{"a": 1}\n{"a": 1e999}\n', "line 2 of 'a.jsonl': the number 1e999 is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", "line 1 of 'a.jsonl': Exceeds the limit (4300 digits)"),
        (b'{"a": ' + b"[" * 100_000, "line 1 of 'a.jsonl' is nested too deeply"),
    ],
    "a.json": [
        (b'[{"a": 1}, 2]', "row 1 of 'a.json': expected an object, got a number"),
        (b'[{"a": 1}', "row 0 of 'a.json' is not JSON"),
    ],
    "a.csv": [
        (b"a,b\n1\n", "line 2 of 'a.csv': it has 1 cells, and the header has 2"),
        (b"a,a\n1,2\n", "line 1 of 'a.csv': two columns have the same name"),
        (b'a,b\n1,"2\n', "line 2 of 'a.csv': unexpected end of data"),
        (b"a,b\n1,\xff\n", "line 2 of 'a.csv' is not UTF-8 (byte 0xff, column 3)"),
    ],
    "a.jsonl.gz": [(gzip.compress(b'{"a": 1}\n', mtime=0)[:-9], "'a.jsonl.gz' cannot be read")],
}


@pytest.mark.parametrize(
    ("name", "content", "message"), [(name, *case) for name in MISTAKES for case in MISTAKES[name]]
)
def test_a_mistake_is_an_error_with_its_place(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as raised:
        read_text_files({name: path})
    assert raised.value.path == "data.source"
    assert message in str(raised.value)
