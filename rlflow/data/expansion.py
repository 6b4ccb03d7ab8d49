"""Checks data files that a stranger may have made: a small file must not become a huge data set when it is read.

A Parquet file holds equal values once, and compression makes a gigabyte of equal bytes a megabyte.
"""

import gzip
import zlib
from pathlib import Path
from typing import Any

from rlflow.errors import RecipeError, first_line

_MOST_TIMES = 200
"""How many times its own size a file may have when it is read. Compressed text has 2 to 20 times."""
_ALWAYS_ALLOWED = 2**24
"""Bytes that any file may have when it is read."""
_WITHOUT_DICTIONARY = {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}
_GZIP = b"\x1f\x8b"
# How files begin that the library would unpack as well.
_OTHERS = {
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"\x04\x22\x4d\x18": "LZ4",
}


def check_expansion(file: Path) -> None:
    """Raise RecipeError for a file that grows out of proportion when it is read, and for one that cannot be counted."""
    max_bytes = max(_ALWAYS_ALLOWED, _MOST_TIMES * file.stat().st_size)
    with file.open("rb") as opened:
        start = opened.read(8)
    for magic, name in _OTHERS.items():
        if start.startswith(magic):
            fix = "unpack it, or move it out of the folder"
            raise RecipeError("data.source", f"'{file}' is compressed with {name}, not with gzip", fix=fix)
    grows = False
    if start.startswith(b"PAR1"):
        grows = _parquet_exceeds(file, max_bytes)
    elif start.startswith(_GZIP):
        grows = _gzip_exceeds(file, max_bytes)
    if grows:
        fact = f"'{file}' would be more than {_MOST_TIMES} times as large when it is read"
        raise RecipeError("data.source", fact, fix="save the rows as JSON, an object on each line")


def _gzip_exceeds(file: Path, max_bytes: int) -> bool:
    """Return whether a file has more bytes without its compression. Raises RecipeError for a damaged file."""
    read = 0
    try:
        with gzip.open(file) as opened:
            while part := opened.read(2**18):
                read += len(part)
                if read > max_bytes:
                    return True
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(file, error) from None
    return False


def _parquet_exceeds(file: Path, max_bytes: int) -> bool:
    """Return whether the values of a file need more bytes, each one counted as often as it occurs.

    Raises RecipeError for a damaged file.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        footer = parquet.read_metadata(file)
        columns = [footer.schema.column(index) for index in range(footer.num_columns)]
        texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        numbers = stored_texts = 0
        encodings = set[str]()
        for group in range(footer.num_row_groups):
            for index, column in enumerate(columns):
                chunk = footer.row_group(group).column(index)
                # Numbers have 8 bytes at most; a text has an offset at least, besides what its page has.
                width = column.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else 8
                size = max(width * chunk.num_values, chunk.total_uncompressed_size)
                if column.path in texts:
                    stored_texts += size
                    encodings.update(chunk.encodings)
                else:
                    numbers += size
        if not texts or numbers + stored_texts > max_bytes:
            return numbers + stored_texts > max_bytes
        # A dictionary holds each value once, however often it occurs. The delta encodings have none, so that only a few
        # rows at a time are safe to read.
        has_dictionary = encodings.isdisjoint(_WITHOUT_DICTIONARY)
        opened = parquet.ParquetFile(file, read_dictionary=texts if has_dictionary else None)
        read_texts = 0
        for batch in opened.iter_batches(2**16 if has_dictionary else 16, columns=texts):
            read_texts += sum(_repeated_bytes(column) for column in batch.columns)
            if numbers + read_texts > max_bytes:
                return True
        return False
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> RecipeError:
    """Return the error for a file that cannot be read to its end, whose size therefore is not known."""
    fact = f"'{file}' is damaged ({first_line(error)})"
    return RecipeError("data.source", fact, fix="copy or download it again, or move it out of the folder")


def _repeated_bytes(values: Any) -> int:
    """Return the bytes of all texts in an array, each counted as often as it occurs."""
    import pyarrow
    from pyarrow import compute, types

    if types.is_dictionary(values.type):
        lengths = compute.take(compute.binary_length(values.dictionary), values.indices)
        return compute.sum(compute.cast(lengths, "int64")).as_py() or 0
    if types.is_struct(values.type):
        return sum(_repeated_bytes(field) for field in values.flatten())
    if types.is_map(values.type):
        return _repeated_bytes(values.keys) + _repeated_bytes(values.items)
    if isinstance(values, pyarrow.ListArray | pyarrow.LargeListArray | pyarrow.FixedSizeListArray):
        return _repeated_bytes(values.flatten())
    return int(values.nbytes)
