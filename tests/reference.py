"""Writes docs/reference.md: every key of a recipe with its type, default, unit and meaning.

    python -m tests.reference

The meaning of a key is the docstring below its field, or else that of the field that it overrides, or that of the
section in the key. The meaning of a reward function's option is the part of the function's docstring that names it.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import annotated_types
from omegaconf import OmegaConf

import rlflow.environments.classes
import rlflow.nodes
import rlflow.rewards.functions
from rlflow.nodes.base import KINDS, Node
from rlflow.recipe import Recipe
from rlflow.recipe.arguments import CONF
from rlflow.recipe.options import CommandOptions
from rlflow.resources.cluster import Cluster
from rlflow.schema import Section
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "reference.md"
# The words in paths for the names that a recipe chooses.
_NAMES = {"models": "NAME", "roles": "ROLE", "sets": "NAME", "gpus": "KIND", "hosts": "N", "functions": "NAME"}
# The units of keys, by the ends of their names.
_UNITS = {
    "_tokens": "tokens",
    "_steps": "steps",
    "_characters": "characters",
    "_gib": "GiB",
    "_mib": "MiB",
    "_gb_s": "GB/s",
    "_tflops": "TFLOP/s",
    "_hours": "hours",
}
# Larger bounds are not shown, because they only keep numbers within 32 or 64 bits.
_LARGE = 2**31 - 1

_INTRODUCTION = """\
# Reference

Every key of a recipe, from the definitions in the code (`python -m tests.reference` writes this page). Each can also be
set on the command line: `graph.rollouts.group_size=16`. Capital letters stand for names that a recipe chooses. `auto`
leaves a choice to the planner; a key without a default is required.
"""
_NODES = """\
`node` is the kind of the node, one of those below or `package.module:Class`. `role` names the role whose engine it
uses, if it uses one. An input that a recipe does not name is the node of that name; `INPUT: NODE` names another. All
further keys are options."""
# The base classes of nodes with options that several kinds share, each with the nodes that it is the base of.
_COMMON = {"PolicyGradient": "every policy update", "Preference": "every update on pairs"}


@dataclass(frozen=True)
class Key:
    """A row of the page."""

    path: str
    type: str
    default: str
    unit: str
    meaning: str

    @property
    def row(self) -> str:
        """Return the row in Markdown."""
        cells = (f"`{self.path}`", self.type, self.default, self.unit, self.meaning)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass(frozen=True)
class Table:
    """A heading with its text and keys."""

    heading: str
    text: str
    keys: tuple[Key, ...]

    @property
    def markdown(self) -> str:
        """Return the heading, the text and the table in Markdown."""
        head = ["| key | type | default | unit | meaning |", "|---|---|---|---|---|"] if self.keys else []
        rows = "\n".join([*head, *(key.row for key in self.keys)])
        return "\n\n".join(filter(None, [self.heading, self.text, rows])) + "\n"


def tables() -> Iterator[Table]:
    """Yield all tables of the page in order."""
    options = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    assert isinstance(options, dict)
    yield Table("## Command line", "", tuple(_keys(CommandOptions, "", defaults=options)))
    yield from _sections(Recipe, "## Recipe", "")
    yield Table("## `graph.NODE`", _NODES, ())
    for base in _bases_of_nodes():
        yield Table(f"### Options of {_COMMON[base.__name__]}", "", tuple(_keys(base, "")))
        yield from _nested(base, "####", "")
    for kind in sorted(KINDS):
        if KINDS[kind].__module__.startswith("rlflow."):
            yield from _node(KINDS[kind])
    for name, module in _modules(rlflow.rewards.functions):
        options_of = inspect.signature(module.reward, eval_str=True).parameters.values()
        keys = tuple(_option(each, module.reward) for each in options_of if _is_option(each))
        if keys:
            yield Table(f"### Reward function `{name}`", plain(module.__doc__.split("\n\n")[0]), keys)
    for name, module in _modules(rlflow.environments.classes):
        keys = tuple(_keys(module.ENVIRONMENT, "options."))
        yield Table(f"### Environment `{name}`", plain(inspect.getdoc(module.ENVIRONMENT) or ""), keys)
    yield from _sections(Cluster, "## `cluster`", "cluster.")


def page() -> str:
    """Return the whole page."""
    return "\n".join([_INTRODUCTION, *(table.markdown for table in tables())])


def _bases_of_nodes() -> list[type]:
    """Return the classes with options that several kinds of nodes share."""
    return [next(base for kind in KINDS.values() for base in kind.__mro__ if base.__name__ == name) for name in _COMMON]


def _node(kind: type[Node]) -> Iterator[Table]:
    """Yield the table of a kind of node, and those of its sections."""
    shared = [base for base in kind.__mro__[1:] if base.__name__ in _COMMON]
    parents = [base for base in KINDS.values() if base in kind.__mro__[1:]]
    bases: list[type] = [*shared, *parents]
    inherited = {field.name for base in bases for field in fields(base)}
    own = {name for base in kind.__mro__ if base not in bases for name in vars(base).get("__annotations__", {})}
    facts = [_summary(kind)]
    if inputs := [f"`{each.name}`" + ("" if each.required else " (optional)") for each in kind.inputs()]:
        facts.append(f"Inputs: {', '.join(inputs)}.")
    if (capability := kind.capability()) is not None:
        facts.append(f"Its role's engine: `{capability.__name__}`.")
    facts += [f"It also has the options of {_COMMON[base.__name__]}." for base in shared]
    facts += [f"It also has the options of `{base.kind}`." for base in parents]
    shown = {field.name for field in fields(kind)} - (inherited - own)
    yield Table(f"### `{kind.kind}`", " ".join(facts), tuple(_keys(kind, "", only=shown)))
    yield from _nested(kind, "####", "", only=shown)


def _sections(kind: type, heading: str, prefix: str) -> Iterator[Table]:
    """Yield the table of a section and those of the sections in it."""
    yield Table(heading, "", tuple(_keys(kind, prefix)))
    yield from _nested(kind, "###", prefix)


def _nested(kind: type, level: str, prefix: str, only: set[str] | None = None) -> Iterator[Table]:
    for name, annotation in _hints(kind).items():
        if only is not None and name not in only:
            continue
        section = _section_in(annotation)
        if section is not None and section is not Recipe:
            path = prefix + name + (f".{_NAMES[name]}" if name in _NAMES and _holds_several(annotation) else "")
            yield Table(f"{level} `{path}`", _summary(section), tuple(_keys(section, f"{path}.")))
            yield from _nested(section, level, f"{path}.")


def _keys(
    kind: type, prefix: str, *, only: set[str] | None = None, defaults: Mapping[Any, Any] | None = None
) -> Iterator[Key]:
    hints = _hints(kind)
    for field in fields(kind):
        if only is None or field.name in only:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if defaults is not None and field.name in defaults:
                default = defaults[field.name]
            annotation = hints[field.name]
            yield Key(
                prefix + field.name,
                _type(annotation),
                _value(default),
                _unit(field.name, annotation),
                _meaning(kind, field.name, annotation),
            )


def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _section_in(annotation: Any) -> type | None:
    """Return the section that a key holds, directly, as one of several, or by name."""
    if isinstance(annotation, type) and is_dataclass(annotation) and issubclass(annotation, Section):
        return annotation
    return next((found for each in get_args(annotation) if (found := _section_in(each)) is not None), None)


def _holds_several(annotation: Any) -> bool:
    return get_origin(annotation) in (Mapping, tuple) or any(map(_holds_several, get_args(annotation)))


def _meaning(kind: type, name: str, annotation: Any) -> str:
    for base in kind.__mro__:
        if name in vars(base).get("__annotations__", {}) and (meaning := docstrings(base).get(name)):
            return plain(meaning)
    section = _section_in(annotation)
    return "" if section is None else _summary(section)


@cache
def docstrings(kind: type) -> Mapping[str, str]:
    """Return the docstring below each field of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for line, following in zip(tree.body, tree.body[1:], strict=False):
        match line, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


def _summary(kind: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return plain((inspect.getdoc(kind) or "").split("\n\n")[0])


def plain(docstring: str) -> str:
    """Return a docstring as one paragraph of Markdown."""
    text = " ".join(docstring.split()).replace("``", "`")
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


def _type(annotation: Any) -> str:
    """Return a type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0]) + _bounds(arguments[1:])
    if origin is Literal:
        return _alternatives([f"`{value}`" for value in arguments])
    if origin is tuple:
        if arguments[1:] == (...,):
            return f"list of: {_type(arguments[0])}"
        return f"list of {len(arguments)}: {_type(arguments[0])}"
    if origin is Mapping:
        return "keys with values"
    if origin is not None and origin is not re.Pattern:
        return _alternatives([_type(each) for each in arguments])
    names: Mapping[Any, str] = {
        bool: "`true` or `false`",
        int: "whole number",
        float: "number",
        str: "text",
        NoneType: "`null`",
        re.Pattern: "regular expression",
        re.Pattern[str]: "regular expression",
        Any: "any value",
    }
    return names.get(annotation, "keys with values")


def _alternatives(types: list[str]) -> str:
    *first, last = dict.fromkeys(types)
    return f"{', '.join(first)} or {last}" if first else last


def _bounds(metadata: tuple[Any, ...]) -> str:
    words = {
        annotated_types.Ge: ("from {:g}", "ge"),
        annotated_types.Gt: ("above {:g}", "gt"),
        annotated_types.Le: ("to {:g}", "le"),
        annotated_types.Lt: ("below {:g}", "lt"),
    }
    bounds = [(words[type(each)][0], getattr(each, words[type(each)][1])) for each in metadata if type(each) in words]
    return "".join(f" {text.format(number)}" for text, number in bounds if number < _LARGE)


def _value(value: Any) -> str:
    """Return a default as a recipe writes it; nothing for a required key, and for a section, which has defaults."""
    if value is MISSING or is_dataclass(value):
        return ""
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(each if isinstance(each, str) else f'{each:g}' for each in value)}]`"
    if isinstance(value, Mapping):
        return "`{}`"
    if isinstance(value, re.Pattern):
        value = value.pattern
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _unit(name: str, annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        for each in annotation.__metadata__:
            if isinstance(each, annotated_types.Unit):
                return each.unit
    if inner := next(filter(None, (_unit("", each) for each in get_args(annotation))), ""):
        return inner
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")


def _modules(package: Any) -> Iterator[tuple[str, Any]]:
    for module in iter_modules(package.__path__):
        yield module.name, import_module(f"{package.__name__}.{module.name}")


def _is_option(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name != "timeout_s"


def _option(parameter: inspect.Parameter, function: Any) -> Key:
    """Return the row of a reward function's option, with the sentences of the docstring that name it."""
    text = plain(inspect.getdoc(function) or "")
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", text)
    default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
    return Key(
        f"options.{parameter.name}",
        _type(parameter.annotation),
        _value(default),
        _unit(parameter.name, parameter.annotation),
        " ".join(each for each in sentences if f"`{parameter.name}`" in each),
    )


if __name__ == "__main__":
    PAGE.write_text(page())
