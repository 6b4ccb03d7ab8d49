"""Checks the folder of a data set, which may come from a stranger: its rows come from the files in it alone."""

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from rlflow.data.expansion import check_expansion
from rlflow.errors import RecipeError

# The two files of a folder in which the library looks for the names of data files.
_CARD, _CONFIGS = "README.md", ".huggingface.yaml"
_LARGEST_CARD = 2**20
"""Bytes of such a file, at most: a parser of YAML takes seconds for a megabyte."""


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
