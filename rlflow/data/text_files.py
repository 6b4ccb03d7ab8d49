"""Reads rows from JSON and CSV files without guessing types: a row holds the values that the file has.

A text stays a text, even if it looks like a date or a number, and integers of any size stay exact. The cells of a CSV
file are texts.
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from rlflow.errors import RecipeError, first_line

Row = Mapping[str, Any]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""The types of files that are read here."""
_LARGEST_CELL = 2**30  # characters; the csv module's own limit is 2**17


def read_text_files(files: Mapping[str, Path]) -> list[Row]:
    """Read the rows of files, by their names; files may be compressed with gzip.

    Every row has the columns of all rows; those that the file leaves out are None. Raises RecipeError with the name of
    the file and the line of a mistake.
    """
    rows: list[Row] = []
    for name, path in files.items():
        with _open(path) as opened:
            rows += _csv_rows(name, opened) if suffix_of(name) in (".csv", ".tsv") else _json_rows(name, opened)
    columns = dict.fromkeys(key for row in rows for key in row)
    return [row if len(row) == len(columns) else {**columns, **row} for row in rows]


def suffix_of(name: str) -> str:
    """Return the suffix of a file that may also be compressed, such as ``.jsonl`` for ``rows.jsonl.gz``."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes if suffix != ".gz"]
    return suffixes[-1] if suffixes else ""


@contextmanager
def _open(path: Path) -> Iterator[BufferedReader]:
    with path.open("rb") as opened:
        if opened.peek(2).startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=opened) as unpacked:
                yield BufferedReader(unpacked)
        else:
            yield opened


def _json_rows(name: str, opened: BufferedReader) -> Iterator[Row]:
    with _mistakes_at(name, "its start"):
        is_list = opened.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    if is_list or suffix_of(name) == ".json":
        yield from _json_values(name, opened)
        return
    for number, line in _lines(name, opened):
        with _mistakes_at(name, f"line {number}"):
            if line.strip():
                yield _checked(_DECODER.decode(line), has_surrogates=_has_surrogates(line))


def _json_values(name: str, opened: BufferedReader) -> Iterator[Row]:
    """Yield the rows of a file that is a list of objects, or objects that may each have several lines."""
    text = "".join(line for _, line in _lines(name, opened))
    has_surrogates = _has_surrogates(text)
    number = 0
    place = _skip_space(text, 0)
    while place < len(text):
        with _mistakes_at(name, f"row {number}"):
            value, place = _DECODER.raw_decode(text, place)
        for row in value if isinstance(value, list) else [value]:
            with _mistakes_at(name, f"row {number}"):
                yield _checked(row, has_surrogates=has_surrogates)
            number += 1
        place = _skip_space(text, place)


def _csv_rows(name: str, opened: BufferedReader) -> Iterator[Row]:
    """Yield the rows of a file whose first line names the columns."""
    reader = csv.reader(
        (line for _, line in _lines(name, opened)), delimiter="\t" if suffix_of(name) == ".tsv" else ",", strict=True
    )
    header: list[str] = []
    usual_limit = csv.field_size_limit(_LARGEST_CELL)
    try:
        while True:
            with _mistakes_at(name, f"line {reader.line_num + 1}"):
                cells = next(reader, None)
                if cells is None:
                    return
                if header and cells and len(cells) != len(header):
                    raise ValueError(f"it has {len(cells)} cells, and the header has {len(header)}")
                if not header and len(set(cells)) < len(cells):
                    raise ValueError("two columns have the same name")
            if header and cells:
                yield dict(zip(header, cells, strict=True))
            header = header or cells
    finally:
        csv.field_size_limit(usual_limit)


def _lines(name: str, opened: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, counted from 1."""
    number = 0
    lines = iter(opened)
    while True:
        number += 1
        with _mistakes_at(name, f"line {number}"):
            line = next(lines, None)
            if line is None:
                return
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        yield number, text


def _has_surrogates(text: str) -> bool:
    return "\\ud" in text or "\\uD" in text


def _checked(value: Any, *, has_surrogates: bool) -> Row:
    """Return a value that is a row. Raises ValueError for another value, and for half of a surrogate pair."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {_type_name(value)}")
    for column, entry in value.items() if has_surrogates else ():
        try:
            json.dumps([column, entry], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"the column {column!r} has half of a surrogate pair") from None
    return value


def _type_name(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key '{repeated}' occurs twice")
    return row


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float)


@contextmanager
def _mistakes_at(name: str, place: str) -> Iterator[None]:
    """Turn a mistake in a file into a RecipeError that names its place."""
    try:
        yield
    except UnicodeDecodeError as error:
        fact = f"{place} of '{name}' is not UTF-8 (byte 0x{error.object[error.start]:02x}, column {error.start + 1})"
        raise RecipeError("data.source", fact, fix="save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        fact = f"{place} of '{name}' is not JSON ({error.msg}, column {error.colno})"
        fix = "write an object on each line, or one list of objects"
        raise RecipeError("data.source", fact, fix=fix) from None
    except (OSError, EOFError, zlib.error) as error:
        fact = f"'{name}' cannot be read ({first_line(error)})"
        raise RecipeError("data.source", fact, fix="copy or download it again") from None
    except RecursionError:
        raise RecipeError("data.source", f"{place} of '{name}' is nested too deeply", fix="remove the row") from None
    except (ValueError, csv.Error) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError("data.source", f"{place} of '{name}': {error}", fix="correct or remove the row") from None
