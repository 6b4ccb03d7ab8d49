"""Writes docs/python.md: the public names of the package, from their signatures and docstrings.

python -m tests.python_reference
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.environments.base import Environment, Observation
from rlflow.nodes.base import Node, State
from rlflow.rewards.base import Failure, batched
from rlflow.runtime.protocols import Report
from tests.conftest import ROOT
from tests.reference import docstrings, plain

PAGE = ROOT / "docs" / "python.md"
RUNNING = (rlflow.load, rlflow.compile, rlflow.run, rlflow.show, rlflow.Observer, Plan, Report)
EXTENDING = (Node, State, batched, Failure, Environment, Observation)
_INTRODUCTION = """\
# Python

The public names of rlflow, from their docstrings (`python -m tests.python_reference` writes this page). All others may
change in any release. [Getting started](getting-started.md#from-python) has an example, and [extending](extending.md)
shows nodes, losses and states at work.
"""


def page() -> str:
    """Return the whole page."""
    running = "\n".join(_entry(each) for each in RUNNING)
    extending = "\n".join(_entry(each) for each in EXTENDING)
    return f"{_INTRODUCTION}\n## To plan and run\n\n{running}\n## To extend\n\n{extending}"


def _entry(public: Any) -> str:
    room = "rlflow" if public.__name__ in rlflow.__all__ else public.__module__
    parts = [f"### `{room}.{public.__name__}`"]
    if inspect.isfunction(public):
        parts.append(f"```python\n{_signature(public)}\n```")
    parts += _paragraphs(inspect.getdoc(public) or "")
    if inspect.isclass(public):
        members = [*_fields(public), *_methods(public)]
        parts.append("\n".join(["| member | meaning |", "|---|---|", *members]))
    return "\n\n".join(parts) + "\n"


def _signature(function: Any) -> str:
    """Return the head of a function as its source has it, without quotes around types."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    returned = "" if tree.returns is None else f" -> {ast.unparse(tree.returns)}"
    return f"{function.__name__}({ast.unparse(tree.args)}){returned}".replace("'", "")


def _paragraphs(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring in Markdown; indented ones are code."""
    for paragraph in docstring.split("\n\n"):
        if paragraph.startswith("    "):
            yield f"```python\n{textwrap.dedent(paragraph)}\n```"
        else:
            yield plain(paragraph)


def _fields(kind: type) -> Iterator[str]:
    """Yield a row for each field of a class with a docstring below it."""
    for name in vars(kind).get("__annotations__", {}) if is_dataclass(kind) or kind is Environment else ():
        if not name.startswith("_"):
            yield _row(name, docstrings(kind).get(name, ""))


def _methods(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        if isinstance(member, property):
            yield _row(name, inspect.getdoc(member) or "")
        elif not name.startswith("_") and callable(function := getattr(member, "__func__", member)):
            arguments = [each for each in inspect.signature(function).parameters if each not in ("self", "cls")]
            yield _row(f"{name}({', '.join(arguments)})", inspect.getdoc(function) or "")


def _row(member: str, docstring: str) -> str:
    return f"| `{member}` | {plain(docstring)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
