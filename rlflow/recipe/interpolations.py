"""Resolves the interpolations of a configuration, which may only refer to other values in it.

OmegaConf can also call functions, as in ``${oc.env:HF_TOKEN}``. A recipe may come from anyone, and plans and logs show
its values, so nothing here reads the environment, the clock or other files. The only function is ``oc.select``, which
gives null, ``{}`` or ``[]`` in place of a value that does not exist.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from rlflow.errors import RecipeError, did_you_mean
from rlflow.schema import check_values

_MISSING = "???"
_REFERENCE = re.compile(
    r"\$\{(?P<select>oc\.select:)?(?P<dots>\.*)(?P<name>[\w-]+(?:[.\[][\w-]+\]?)*)"
    r"(?(select)(?:,(?P<default>\{\}|\[\]))?)\}"
)
_DEFAULTS: Mapping[str | None, Any] = {None: None, "{}": {}, "[]": []}
# References to references could double the size of a configuration with every line.
MAX_SIZE = 2**20
_SIZE_OF_VALUE = 100  # characters that count as much as a value

_Path = tuple[str | int, ...]


def to_mapping(config: DictConfig) -> dict[str, Any]:
    """Return the configuration as dicts and lists, with interpolations resolved. Raises RecipeError."""
    mapping = OmegaConf.to_container(config, resolve=False)
    check_values(mapping, "")
    return cast(dict[str, Any], _Resolver(mapping).resolve((), mapping))


class _Resolver:
    """The values of a configuration, each resolved once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._resolved: dict[_Path, tuple[Any, int]] = {}
        self._open: list[_Path] = []
        """The paths of references that are being followed."""
        self._size = 0
        """The size of what was resolved so far, that of references as often as they are used."""

    def resolve(self, path: _Path, value: Any) -> Any:
        """Return ``value``, found at ``path``, with all references in it replaced. Raises RecipeError."""
        self._grow(path, _SIZE_OF_VALUE + (len(value) if isinstance(value, str) else 0))
        if isinstance(value, dict):
            return {key: self.resolve((*path, key), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.resolve((*path, index), inner) for index, inner in enumerate(value)]
        if not isinstance(value, str):
            return value
        if value == _MISSING:
            raise RecipeError(_name(path), "is missing", fix=f"add {_name(path)}=...")
        return self._replaced(path, value) if "${" in value else value

    def _replaced(self, path: _Path, text: str) -> Any:
        """Return the text with its references replaced; a text that is one reference becomes its value."""
        if "${" in _REFERENCE.sub("", text):
            fact = f"'{text}' calls a function, but a recipe may only refer to its own values, as ${{data.batch_size}}"
            fix = f'write the value; {_name(path)}="$NAME" on the command line takes it from the environment'
            raise RecipeError(_name(path), fact, fix=fix)
        if whole := _REFERENCE.fullmatch(text):
            return self._follow(path, whole)
        return _REFERENCE.sub(lambda match: self._as_text(path, match), text)

    def _as_text(self, path: _Path, match: re.Match[str]) -> str:
        value = self._follow(path, match)
        if not isinstance(value, str | int | float):
            raise RecipeError(_name(path), f"'{match[0]}' is not a text or a number", fix="refer to one of these")
        return str(value)

    def _follow(self, path: _Path, match: re.Match[str]) -> Any:
        """Return the value that a reference at ``path`` names."""
        dots, name = len(match["dots"]), match["name"]
        start = path[: len(path) - dots] if dots else ()
        target: _Path = (*start, *(part.rstrip("]") for part in re.split(r"[.\[]", name)))
        if target in self._open or target == path[: len(target)]:
            raise RecipeError(_name(path), f"'{match[0]}' refers to itself", fix="write the value")
        if target in self._resolved:
            value, size = self._resolved[target]
            self._grow(path, size)
            return value
        before = self._size
        self._open.append(target)
        value = self.resolve(target, self._find(path, target, match))
        self._open.pop()
        self._resolved[target] = value, self._size - before
        return value

    def _find(self, path: _Path, target: _Path, reference: re.Match[str]) -> Any:
        """Return the value at ``target`` as it is written, or the default of the reference."""
        value = self._root
        for part in target:
            known = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
            key = int(part) if isinstance(value, list) and str(part).isdecimal() else part
            if key not in known and reference["select"]:
                return _DEFAULTS[reference["default"]]
            if key not in known:
                fix = did_you_mean(str(part), map(str, known)) or "name a value that the recipe has"
                raise RecipeError(_name(path), f"'{reference[0]}' refers to nothing: no '{part}'", known=known, fix=fix)
            value = known[key]
        return value

    def _grow(self, path: _Path, size: int) -> None:
        self._size += size
        if self._size > MAX_SIZE:
            raise RecipeError(_name(path), "references make the recipe too large", fix="use fewer references")


def _name(path: _Path) -> str:
    return ".".join(map(str, path)) or "recipe"
