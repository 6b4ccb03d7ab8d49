"""Reads the rows of a data set from files of this machine or from the hub."""

import glob
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlflow.data.encoding import Rows
from rlflow.data.expansion import check_expansion
from rlflow.data.folders import check_folder
from rlflow.errors import RecipeError, first_line
from rlflow.recipe import Data

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# The kinds of data that a folder or a repository may hold. "cache" is data that was downloaded before.
_KINDS = ("json", "csv", "parquet", "text", "cache")
_FIX_CONTENT = "files need rows: Parquet, or a JSON object on each line, in UTF-8 and with different keys"
_FIX_SPLIT = "a single file has only the split 'train'; 'train[:90%]' selects a part of it"


def is_local(source: str) -> bool:
    """Return whether a source means a file or a folder of this machine, which need not exist."""
    path = Path(os.path.expanduser(source))
    return path.exists() or path.suffix in _FORMATS or source.startswith((".", "/", "~"))


def read_files_or_hub(data: Data, field: str, split: str) -> Rows:
    """Read the rows of a split, which the recipe names in ``field`` of its data. Raises RecipeError."""
    import datasets

    datasets.disable_progress_bars()
    path, local = Path(os.path.expanduser(data.source)), is_local(data.source)
    if local and not path.exists():
        raise RecipeError("data.source", f"'{data.source}' does not exist", fix=f"relative paths start at {Path.cwd()}")
    try:
        if path.is_file():
            if path.suffix not in _FORMATS:
                fact = f"files of the type '{path.suffix}' are not supported"
                raise RecipeError("data.source", fact, known=_FORMATS, fix="convert it to one of these")
            check_expansion(path)
            # Escaped, because the library takes the path for a pattern.
            loaded = datasets.load_dataset(_FORMATS[path.suffix], data_files=glob.escape(str(path)), split=split)
        else:
            if local:
                check_folder(path)
            builder = datasets.load_dataset_builder(str(path) if local else data.source, data.name)
            kind = type(builder).__module__.rpartition(".")[2]
            if kind not in _KINDS:
                fact = f"'{data.source}' holds data of the kind '{kind}'"
                raise RecipeError("data.source", fact, known=_KINDS[:-1], fix="convert it to JSON or Parquet")
            builder.download_and_prepare()
            loaded = builder.as_dataset(split=split)
        _leave_encoded(loaded.info.features)
    except RecipeError:
        raise
    except Exception as error:  # the library passes on the errors of many others
        # The library converts errors about a file's content; it finds no first row in an empty file.
        is_content = local and (error.__cause__ is not None or isinstance(error, StopIteration))
        raise RecipeError(
            f"data.{'source' if is_content else field}",
            f"'{split}' of '{data.source}' cannot be read ({first_line(_cause(error))})",
            fix=_FIX_CONTENT if is_content else _FIX_SPLIT,
        ) from None
    return _decode(data, loaded)


def _leave_encoded(feature: Any) -> None:
    """Leave images and other media as they are in the file: decoding opens the path or the address that a row names."""
    from datasets import Json

    if isinstance(feature, Mapping | list):
        for inner in feature.values() if isinstance(feature, Mapping) else feature:
            _leave_encoded(inner)
    elif hasattr(feature, "decode") and not isinstance(feature, Json):
        feature.decode = False
    elif hasattr(feature, "feature"):
        _leave_encoded(feature.feature)


def _cause(error: BaseException) -> BaseException:
    """Return the error that an error of the library was raised for."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _decode(data: Data, loaded: Iterable[Mapping[str, Any]]) -> Rows:
    """Read all rows. Raises RecipeError for a row that is not UTF-8."""
    rows: list[Mapping[str, Any]] = []
    try:
        rows.extend(loaded)
    except UnicodeDecodeError as error:
        raise RecipeError(
            "data.source",
            f"row {len(rows)} of '{data.source}' is not UTF-8 (byte 0x{error.object[error.start]:02x})",
            fix="save the file as UTF-8",
        ) from None
    return rows
