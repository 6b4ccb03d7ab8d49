"""Reads YAML files safely and reports every mistake with its file and line."""

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlflow.errors import FileError, first_line
from rlflow.system.compat.omegaconf import yaml_loader

# The largest recipe of rlflow has 3 KB and 150 values. Hydra copies every value several times, so a file of a few
# hundred bytes whose aliases expand to millions of values would keep it busy for minutes.
MAX_BYTES = 64 * 1024
MAX_LINES = 10_000  # which PyYAML reads in 0.08 s at worst
MAX_VALUES = 10_000
MAX_EVENTS = 2 * MAX_VALUES  # a list or mapping has two, its start and its end
MAX_DEPTH = 64
MAX_REFERENCE = 200  # OmegaConf's parser is slow: 100,000 braces would take half a minute

_FIXES = {
    "duplicate key": "remove one of the two",
    "undefined alias": "define it before with &, or quote a text that begins with *",
    "unhashable": "use a text as the key",
    "but got": "close the bracket",
}
"""The fix for the problems that people meet most often, by some words of PyYAML's message."""

_TAG = "tag:yaml.org,2002:"
_NUMBERS = {f"{_TAG}{name}" for name in ("int", "float")}
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_PLAIN = {f"{_TAG}{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}


def read_yaml(path: Path) -> DictConfig:
    """Return the mapping in the file at ``path``. Raises FileError."""
    return parse_yaml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of the file at ``path``. Raises FileError, also for a file that is too large for a recipe."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        fix = "check its path and who may read it"
        raise FileError(str(path), f"cannot be read ({error.strerror})", fix=fix) from None
    if len(content) > MAX_BYTES:
        raise FileError(
            str(path),
            f"has more than {MAX_BYTES // 1024} KiB, which no recipe needs",
            fix="put data into a file of its own and name it in data.source",
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise FileError(
            f"{path}:{line}", f"byte 0x{content[error.start]:02x} is not UTF-8", fix="save the file as UTF-8"
        ) from None


def parse_yaml(text: str, file: str) -> DictConfig:
    """Return the mapping in ``text``, the content of ``file``. Raises FileError."""
    try:
        _check_size(text, file)
        loader = yaml_loader(text)
        node = loader.get_single_node()
        if node is None:
            return OmegaConf.create()
        _check_scalars(node, file)
        if _num_values(node, {}, file) > MAX_VALUES:
            raise FileError(
                file, f"has more than {MAX_VALUES} values once its aliases are expanded", fix="use fewer aliases"
            )
        if not isinstance(node, yaml.MappingNode):
            raise FileError(_at(file, node.start_mark), "expected a mapping", fix="write KEY: VALUE on each line")
        mapping: dict[Any, Any] = loader.construct_document(node)
        return OmegaConf.create(mapping)
    except yaml.YAMLError as error:
        raise _yaml_error(error, file) from None
    except RecursionError:
        raise FileError(file, "is nested too deeply", fix="use fewer levels") from None
    except (ValueError, KeyError, TypeError, OmegaConfBaseException) as error:
        if isinstance(error, FileError):
            raise
        # Examples: a value that contradicts its tag (!!int x), a number of thousands of digits, a key that is a list.
        fix = "quote the value, or write it as a plain number or text"
        raise FileError(file, f"has a value that cannot be read ({first_line(error)})", fix=fix) from None


def _check_size(text: str, file: str) -> None:
    """Raise FileError for a text with too many lines, values or levels, before PyYAML's slow parser reads it.

    Other mistakes in the text are ignored here, because the slow parser has the better messages.
    """
    if text.count("\n") > MAX_LINES:
        raise FileError(file, f"has more than {MAX_LINES} lines", fix="put data into a file of its own")
    too_deep = FileError(file, "is nested too deeply", fix=f"use {MAX_DEPTH} levels at most")
    depth = count = 0
    try:
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            count += 1
            if depth > MAX_DEPTH:
                raise too_deep
            if count > MAX_EVENTS:
                raise FileError(file, f"has more than {MAX_VALUES} values", fix="put data into a file of its own")
    except yaml.YAMLError as error:
        # libyaml looks ahead, and since 0.2.6 gives up at 1,000 open brackets before it yields the first.
        if "nesting" in str(error):
            raise too_deep from None


def _check_scalars(root: yaml.Node, file: str) -> None:
    """Raise FileError for a tag other than those of plain values, and for numbers that YAML 1.1 reads in another base.

    It reads ``1:30`` as 90, since a minute has 60 seconds, and ``010`` as 8.
    """
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.tag not in _PLAIN:
            raise FileError(
                _at(file, node.start_mark),
                f"the tag '{node.tag.replace(_TAG, '!!')}' is not supported",
                fix="quote the value, or write it as a plain number, text, list or mapping",
            )
        if node.tag in _NUMBERS and (":" in node.value or _OCTAL.fullmatch(node.value)):
            raise FileError(
                _at(file, node.start_mark),
                f"YAML reads {node.value} in base {60 if ':' in node.value else 8}",
                fix="write a decimal number, or quote a text",
            )
        if isinstance(node, yaml.ScalarNode) and "${" in node.value and len(node.value) > MAX_REFERENCE:
            fact = f"a text with a reference has more than {MAX_REFERENCE} characters"
            raise FileError(_at(file, node.start_mark), fact, fix="write its value")
        stack += _children(node)


def _num_values(node: yaml.Node, counts: dict[int, int | None], file: str) -> int:
    """Return how many values ``node`` has after its aliases are expanded; counting stops above the limit.

    ``counts`` holds the result of each node, and None while a node is being counted. Raises FileError for an alias to
    a node that contains it.
    """
    if id(node) in counts:
        if (known := counts[id(node)]) is None:
            raise FileError(
                _at(file, node.start_mark), "an alias refers to the value that contains it", fix="remove the alias"
            )
        return known
    counts[id(node)] = None
    count = 1
    for child in _children(node):
        count = min(count + _num_values(child, counts, file), MAX_VALUES + 1)
    counts[id(node)] = count
    return count


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _yaml_error(error: yaml.YAMLError, file: str) -> FileError:
    if not isinstance(error, yaml.MarkedYAMLError):
        return FileError(file, f"is not a text file ({first_line(error)})", fix="remove the control characters")
    problem = (error.problem or error.context or "is not YAML").replace("\t", "\\t").rstrip(". ")
    mark = error.problem_mark or error.context_mark
    fix = next((fix for words, fix in _FIXES.items() if words in problem), "write KEY: VALUE on each line")
    if "'\\t'" in problem:
        fix = "indent with spaces, not with tabs"
    elif "another document" in problem or "single document" in (error.context or ""):
        problem, fix = "has a second document", "remove the line '---' and everything after it"
    return FileError(_at(file, mark), problem, fix=fix)


def _at(file: str, mark: Any) -> str:
    return f"{file}:{mark.line + 1}" if mark is not None else file
