"""Reads the rows of a data set from files of this machine or from the hub."""

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from rlflow.data.expansion import check_expansion
from rlflow.data.mistakes import Rows
from rlflow.data.text_files import SUFFIXES, read_text_files, suffix_of
from rlflow.errors import RecipeError, first_line
from rlflow.recipe import Data

if TYPE_CHECKING:
    from datasets import Dataset

_TYPES = (*SUFFIXES, ".parquet")
# The kinds of data that a folder or a repository may hold. "cache" is data that was downloaded before.
_KINDS = ("json", "csv", "parquet", "text", "cache")
_FIX_CONTENT = "files need rows: Parquet, CSV, or a JSON object on each line, in UTF-8"
_FIX_SPLIT = "a single file has only the split 'train'; 'train[:90%]' selects a part of it"
# The two files of a folder in which the library looks for the names of data files.
_CARD, _CONFIGS = "README.md", ".huggingface.yaml"
_LARGEST_CARD = 2**20
"""Bytes of such a file, at most: a parser of YAML takes seconds for a megabyte."""


def is_local(source: str) -> bool:
    """Return whether a source means a file or a folder of this machine, which need not exist."""
    path = Path(os.path.expanduser(source))
    return path.exists() or suffix_of(source) in _TYPES or source.startswith((".", "/", "~"))


def read_files_or_hub(data: Data, field: str, split: str) -> Rows:
    """Read the rows of a split, which the recipe names in ``field`` of its data. Raises RecipeError."""
    import datasets

    datasets.disable_progress_bars()
    path, local = Path(os.path.expanduser(data.source)), is_local(data.source)
    if local and not path.exists():
        raise RecipeError("data.source", f"'{data.source}' does not exist", fix=f"relative paths start at {Path.cwd()}")
    try:
        if path.is_file():
            return _read_file(path, split)
        if local:
            check_folder(path)
            _check_types(path.rglob("*.parquet"))
        builder = datasets.load_dataset_builder(str(path) if local else data.source, data.name)
        kind = type(builder).__module__.rpartition(".")[2]
        if kind not in _KINDS:
            fact = f"'{data.source}' holds data of the kind '{kind}'"
            fix = "name the file with the rows" if kind == "imagefolder" else "convert it to JSON or Parquet"
            raise RecipeError("data.source", fact, known=_KINDS[:-1], fix=fix)
        if kind in ("json", "csv"):
            return _read_splits({str(name): files for name, files in builder.config.data_files.items()}, split)
        builder.download_and_prepare()
        return _decode(data.source, builder.as_dataset(split=split))
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


def _read_file(path: Path, split: str) -> Rows:
    import datasets

    if suffix_of(path.name) not in _TYPES:
        fact = f"files of the type '{path.suffix}' are not supported"
        raise RecipeError("data.source", fact, known=_TYPES, fix="convert it to one of these")
    check_expansion(path)
    if suffix_of(path.name) != ".parquet":
        return _read_splits({"train": [str(path)]}, split)
    _check_types([path])
    # Escaped, because the library takes the path for a pattern.
    return _decode(path, datasets.load_dataset("parquet", data_files=glob.escape(str(path)), split=split))


def _check_types(files: Iterable[Path]) -> None:
    """Raise RecipeError for a column of a Parquet file whose type the library does not know."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    for file in files:
        for column in parquet.read_schema(file):
            try:
                datasets.Features.from_arrow_schema(pyarrow.schema([column]))
            except ValueError:
                fact = f"the column '{column.name}' of '{file}' has the type {column.type}, which cannot be read"
                raise RecipeError("data.source", fact, fix="save it as text, numbers, structs or lists") from None


def _read_splits(files: Mapping[str, Sequence[str]], split: str) -> Rows:
    """Read JSON or CSV files of a split such as ``train[:90%]`` or ``train+test``, by path or URL."""
    import datasets

    names = [part.partition("[")[0].strip() for part in split.split("+")]
    # Returns the path of a local file, and downloads the others.
    download = datasets.DownloadManager().download
    rows = {
        name: read_text_files({file: Path(download(file)) for file in files[name]}) for name in names if name in files
    }
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows.get(name, ())) for name in files})
    return [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]


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


def _decode(source: object, loaded: "Dataset") -> Rows:
    """Read all rows, with media as they are in the file. Raises RecipeError for a text that is not UTF-8."""
    rows: list[Mapping[str, Any]] = []
    _leave_encoded(loaded.info.features)
    try:
        rows.extend(loaded)
    except UnicodeDecodeError as error:
        column = next(name for name in loaded.column_names if not _is_text(loaded, name, len(rows)))
        fact = f"row {len(rows)} of '{source}' is not UTF-8 in '{column}' (byte 0x{error.object[error.start]:02x})"
        raise RecipeError("data.source", fact, fix="save the file as UTF-8") from None
    return rows


def _is_text(loaded: "Dataset", column: str, row: int) -> bool:
    with suppress(UnicodeDecodeError):
        loaded.select_columns(column)[row]
        return True
    return False


def check_folder(folder: Path) -> None:
    """Raise RecipeError for a folder that names data files outside of it, or has files that grow out of proportion."""
    if glob.has_magic(str(folder)):
        raise RecipeError("data.source", f"'{folder}' has one of the characters *?[", fix="rename the folder")
    for name in (_CARD, _CONFIGS):
        file = folder / name
        if not file.is_file():
            continue
        if file.stat().st_size > _LARGEST_CARD:
            raise RecipeError("data.source", f"'{file}' is larger than 1 MiB", fix="shorten or remove it")
        for place in _data_files(file):
            if urlparse(place).scheme or "::" in place or os.path.isabs(place) or ".." in Path(place).parts:
                fact = f"'{file}' names the data file '{place}', which is not a path inside of the folder"
                raise RecipeError("data.source", fact, fix="write a path relative to the folder, such as data/a.jsonl")
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            check_expansion(file)


def _data_files(file: Path) -> Iterator[str]:
    """Yield the paths and patterns of data files that a card or a file of configurations names."""
    import yaml
    from huggingface_hub import DatasetCard

    if file.name == _CARD:
        content: Any = DatasetCard.load(file).data.to_dict()
    else:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    configs = content.get("configs") if isinstance(content, Mapping) else None
    seen: set[int] = set()
    for config in configs if isinstance(configs, list) else ():
        if isinstance(config, Mapping):
            yield from _texts(config.get("data_files"), seen)
            yield from _texts(config.get("data_dir"), seen)


def _texts(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield the texts in nested values, each part once: aliases of YAML may repeat one billions of times."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping) and id(value) not in seen:
        seen.add(id(value))
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner, seen)
