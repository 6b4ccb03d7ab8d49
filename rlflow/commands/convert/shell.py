"""Commands of a shell script, with the script's own variables, arrays and sums filled in. Nothing is run."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlflow.errors import RecipeError
from rlflow.extras import check_extra

if TYPE_CHECKING:
    from tree_sitter import Node

_MAX_CHARACTERS = 256 * 1024
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_UNBRACED = re.compile(rb"(?<![\\$])\$([A-Za-z_]\w*)")
_BRANCHES = {"if_statement", "case_statement", "while_statement", "for_statement", "c_style_for_statement", "list"}
_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
}


@dataclass
class Script:
    """The commands of a shell script."""

    commands: list[list[str]] = field(default_factory=list)
    """The words of each command, as the shell would pass them on. What only the shell knows stays: ``$HOME``."""
    choices: dict[str, list[str]] = field(default_factory=dict)
    """The values of each variable that branches change. The first of them is the one filled in."""


def read_script(text: str) -> Script:
    """Read a script for bash or sh. All branches are read, in their order.

    Raises RecipeError if the script is too large, and if the library that reads it is not installed.
    """
    check_extra("tree-sitter-bash", "script", "the converter")
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    if len(text) > _MAX_CHARACTERS:
        raise _too_large()
    # A carriage return would end up in the last argument of each line.
    text = text.replace("\r\n", "\n")
    if _CONTROL.search(text):
        raise RecipeError("script", "has control characters", fix="text without them")
    script, reader = text.encode(), _Reader()
    parser = Parser(Language(tree_sitter_bash.language()))
    try:
        # The library splits $A/$B/c into two words, but not ${A}/${B}/c.
        braced = _with_braces(script, parser.parse(script).root_node)
        reader.read(parser.parse(braced).root_node)
    except RecursionError:
        raise RecipeError("script", "is nested too deeply", fix="keep the command that trains") from None
    return reader.script


def _with_braces(script: bytes, root: "Node") -> bytes:
    """Return the script with ``${name}`` in place of ``$name``, but not where the shell reads neither."""
    parts, start = list[bytes](), 0
    for node in _literals(root):
        parts += [_UNBRACED.sub(rb"${\1}", script[start : node.start_byte]), script[node.start_byte : node.end_byte]]
        start = node.end_byte
    return b"".join([*parts, _UNBRACED.sub(rb"${\1}", script[start:])])


def _literals(node: "Node") -> Iterator["Node"]:
    """Yield the strings in single quotes and the comments."""
    if node.type in ("raw_string", "comment"):
        yield node
    for child in node.named_children:
        yield from _literals(child)


def _too_large() -> RecipeError:
    return RecipeError("script", "has more than 256 KiB of text or of arguments", fix="keep the command that trains")


class _Reader:
    """The state of the shell while its commands are read."""

    def __init__(self) -> None:
        self.script = Script()
        self._variables: dict[str, str] = {}
        self._arrays: dict[str, list[str]] = {}

    def read(self, node: "Node", *, in_branch: bool = False) -> None:
        """Add the commands of a part of the script."""
        in_branch = in_branch or node.type in _BRANCHES
        if node.type == "variable_assignment":
            self._read_assignment(node, in_branch)
            return
        if node.type == "command":
            self._read_command(node, in_branch)
            return
        if node.type == "for_statement":
            name, *values = (child for child in node.named_children if child.type != "do_group")
            for value in values:
                for word in self._words(value):
                    self._assign(_text(name), word, in_branch)
        for child in node.named_children:
            self.read(child, in_branch=in_branch)
        if node.type == "redirected_statement" and self.script.commands:
            self._read_words_after_files(node)

    def _read_command(self, node: "Node", in_branch: bool) -> None:
        words: list[str] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._read_assignment(child, in_branch)
            elif "redirect" not in child.type:
                words += self._words(child)
        if words and words[0] in _DECLARATIONS:
            for name, _, value in (word.partition("=") for word in words[1:] if "=" in word):
                self._assign(name, value, in_branch)
        if sum(map(len, words)) > _MAX_CHARACTERS:
            raise _too_large()
        self.script.commands.append(words)

    def _read_words_after_files(self, node: "Node") -> None:
        """Add words after the file of a redirection, which belong to the command before it."""
        for redirect in node.named_children[1:]:
            for word in redirect.children_by_field_name("destination")[1:]:
                self.script.commands[-1] += self._words(word)

    def _read_assignment(self, node: "Node", in_branch: bool) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return
        adds = any(_text(child) == "+=" for child in node.children)
        if value is not None and value.type == "array":
            words = [word for child in value.named_children if child.type != "comment" for word in self._words(child)]
            self._assign_array(_text(name), [*(self._arrays.get(_text(name), []) if adds else []), *words], in_branch)
        else:
            before = self._variables.get(_text(name), "") if adds else ""
            self._assign(_text(name), before + (self._value(value) if value else ""), in_branch)

    def _assign(self, name: str, value: str, in_branch: bool) -> None:
        if len(value) > _MAX_CHARACTERS:
            raise _too_large()
        before = self._variables.get(name, value)
        if in_branch and before != value:
            self.script.choices.setdefault(name, [before]).append(value)
        else:
            self._variables[name] = value

    def _assign_array(self, name: str, words: list[str], in_branch: bool) -> None:
        if sum(map(len, words)) > _MAX_CHARACTERS:
            raise _too_large()
        before = self._arrays.get(name, words)
        if in_branch and before != words:
            self.script.choices.setdefault(name, [" ".join(before)]).append(" ".join(words))
        else:
            self._arrays[name] = words

    def _words(self, node: "Node") -> list[str]:
        """Return the words of a part of a command: several for an array, and for a variable without quotes."""
        inner = node
        while inner.type in ("string", "command_name") and inner.named_child_count == 1:
            inner = inner.named_children[0]
        if inner.type == "expansion" and inner.named_children and inner.named_children[0].type == "subscript":
            name, _, index = _text(inner.named_children[0]).rstrip("]").partition("[")
            if name in self._arrays and index in ("@", "*"):
                words = self._arrays[name]
                return words if inner is not node else [part for word in words for part in word.split()]
        value = self._value(node)
        return value.split() if node.type in ("simple_expansion", "expansion") else [value]

    def _value(self, node: "Node") -> str:
        """Return the text of a part of a word."""
        match node.type:
            case "word":
                return re.sub(r"\\(.)", r"\1", _text(node).replace("\\\n", ""))
            case "raw_string":
                return _text(node)[1:-1]
            case "string":
                return self._joined(node, node.start_byte + 1, node.end_byte - 1)
            case "string_content":
                return re.sub(r'\\(["\\$`])', r"\1", _text(node).replace("\\\n", ""))
            case "concatenation" | "command_name":
                return self._joined(node, node.start_byte, node.end_byte)
            case "simple_expansion" | "expansion":
                return self._variable(node)
            case "arithmetic_expansion" if node.named_children:
                number = self._number(node.named_children[0])
                return _text(node) if number is None else str(number)
            case _:
                return _text(node)

    def _joined(self, node: "Node", start: int, end: int) -> str:
        """Return the values of a node's parts between two places, and the text between these parts."""
        text, first, joined = node.text or b"", node.start_byte, ""
        for child in node.named_children:
            if child.start_byte >= start:
                joined += text[start - first : child.start_byte - first].decode() + self._value(child)
                start = child.end_byte
            if len(joined) > _MAX_CHARACTERS:
                raise _too_large()
        return joined + text[start - first : end - first].decode()

    def _variable(self, node: "Node") -> str:
        """Return the value of ``$name``, ``${name}`` and ``${name:-default}``; for an unknown variable ``$name``."""
        name, *operators = [child for child in node.children if _text(child) not in ("$", "${", "}")] or [node]
        known = self._variables.get(_text(name))
        how = _text(operators[0]) if operators else ""
        if how in (":-", ":=", "-", "=") and not known:
            return self._joined(node, operators[0].end_byte, node.end_byte - 1)
        if known is not None and how in ("", ":-", ":=", "-", "="):
            return known
        return f"${_text(name)}" if name.type == "variable_name" and not operators else _text(node)

    def _number(self, node: "Node") -> int | None:
        """Return the value of a sum or product; None if only the shell knows it."""
        if node.type == "parenthesized_expression":
            return self._number(node.named_children[0])
        if node.type == "binary_expression":
            left, sign, right = (node.child_by_field_name(name) for name in ("left", "operator", "right"))
            if left is None or sign is None or right is None:
                return None
            first, second, calculate = self._number(left), self._number(right), _OPERATORS.get(_text(sign))
            if first is None or second is None or calculate is None:
                return None
            try:
                result = calculate(first, second)
            except ZeroDivisionError:
                return None
            return result if abs(result) < 2**63 else None
        text = self._value(node)
        text = self._variables.get(text, text)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def _text(node: "Node") -> str:
    return (node.text or b"").decode()
