"""Variables of a shell script, and the values of its words, sums and conditions. Nothing is run."""

import operator
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rlflow.errors import RecipeError

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_CHARACTERS = 256 * 1024
# An argument of the script, which is known only when it runs.
_POSITIONAL = re.compile(r"\$[\d@*]")
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    **{"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt},
    **{"-le": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge},
    **{"<": operator.lt, "<=": operator.le},
}

Taken = bool | None
"""True for a part that runs when the script is started as it is, None where that is not known."""


def both(first: Taken, second: Taken) -> Taken:
    """Return whether both hold."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def negated(condition: Taken) -> Taken:
    """Return whether the condition does not hold."""
    return None if condition is None else not condition


def text_of(node: "Node") -> str:
    """Return the text of a part of the script."""
    return (node.text or b"").decode()


def too_large() -> RecipeError:
    """Return the error for a script that is too large, as it is or with its variables filled in."""
    return RecipeError("script", "has more than 256 KiB of text or of arguments", fix="keep the command that trains")


class ShellValues:
    """The shell's variables while a script is read. Variables that the script never sets are taken to be unset."""

    def __init__(self) -> None:
        self.choices: dict[str, list[list[str]]] = {}
        """The values of each variable that branches change, as words. The first is the one in use."""
        self._variables: dict[str, list[str]] = {}
        self._unused: dict[str, list[str]] = {}
        """The first value of each variable that only branches set that are not taken."""

    def assign(self, name: str, words: list[str], taken: Taken) -> None:
        """Set a variable to a text, as a single word, or to an array."""
        if sum(map(len, words)) > MAX_CHARACTERS:
            raise too_large()
        before = self._variables.get(name)
        if taken or (taken is None and (before is None or _is_argument(before))):
            self._variables[name] = words
        elif before is None and _is_argument(self._unused.get(name, ["$1"])):
            self._unused[name] = words
        if name in self.choices or not taken:
            used = self._variables.get(name, self._unused.get(name, words))
            known = [value for value in (used, before, *self.choices.get(name, ()), words) if value is not None]
            self.choices[name] = [value for place, value in enumerate(known) if value not in known[:place]]

    def append(self, name: str, words: list[str], taken: Taken, *, is_array: bool) -> None:
        """Add to a variable's text, or words to an array."""
        before = self._variables.get(name, [])
        self.assign(name, [*before, *words] if is_array else ["".join([*before, *words])], taken)

    def pass_arguments(self, words: list[str] | None) -> list[str] | None:
        """Set ``$1``, ``$#`` and ``$@`` and return those before; None stands for the unknown ones of the script."""
        before = self._variables.pop("@", None)
        for number in range(1, 1 + len(before or ())):
            self._variables.pop(str(number))
        self._variables.pop("#", None)
        if words is not None:
            self._variables |= {"@": words, "#": [str(len(words))]}
            self._variables |= {str(number): [word] for number, word in enumerate(words, 1)}
        return before

    def shift_arguments(self, count: int) -> None:
        """Drop the first arguments of a function."""
        if (words := self._variables.get("@")) is not None:
            self.pass_arguments(words[count:])

    def words(self, node: "Node") -> list[str]:
        """Return the words of a part of a command: several for an array, and for a variable without quotes."""
        inner = node
        while inner.type in ("string", "command_name") and inner.named_child_count == 1:
            inner = inner.named_children[0]
        if inner.type == "expansion" and inner.named_children and inner.named_children[0].type == "subscript":
            name, _, index = text_of(inner.named_children[0]).rstrip("]").partition("[")
            if index in ("@", "*") and len(inner.named_children) == 1 and text_of(inner.children[1]) != "#":
                words = self._variables.get(name, self._unused.get(name, [text_of(inner)]))
                return words if inner is not node else [part for word in words for part in word.split()]
        if text_of(inner) in ("$@", "$*", "${@}") and "@" in self._variables:
            return self._variables["@"]
        value = self.value(node)
        return value.split() if node.type in ("simple_expansion", "expansion") else [value]

    def value(self, node: "Node") -> str:
        """Return the text of a part of a word. What only the shell knows stays: ``$HOME``."""
        match node.type:
            case "word":
                return re.sub(r"\\(.)", r"\1", text_of(node).replace("\\\n", ""))
            case "raw_string":
                return text_of(node)[1:-1]
            case "string":
                return self._joined(node, node.start_byte + 1, node.end_byte - 1)
            case "string_content":
                return re.sub(r'\\(["\\$`])', r"\1", text_of(node).replace("\\\n", ""))
            case "concatenation" | "command_name":
                return self._joined(node, node.start_byte, node.end_byte)
            case "simple_expansion" | "expansion":
                return self._expansion(node)
            case "arithmetic_expansion" if node.named_children:
                number = self._number(node.named_children[0])
                return text_of(node) if number is None else str(number)
            case _:
                return text_of(node)

    def holds(self, node: "Node") -> Taken:
        """Return whether a condition holds: tests of texts and numbers; None for all others."""
        parts = node.named_children
        match node.type:
            case "test_command" | "parenthesized_expression" | "compound_statement" if len(parts) == 1:
                return self.holds(parts[0])
            case "negated_command" if parts:
                return negated(self.holds(parts[0]))
            case "list" | "binary_expression":
                return self._holds_for_two(node)
            case "unary_expression" if text_of(node).startswith("!"):
                return negated(self.holds(parts[-1]))
            case "unary_expression" if text_of(parts[0]) in ("-z", "-n"):
                text = self.known_text(parts[1])
                return None if text is None else (text == "") == (text_of(parts[0]) == "-z")
            case "simple_expansion" | "expansion" | "string" | "word" | "number":
                text = self.known_text(node)
                return None if text is None else text != ""
            case _:
                return None

    def _holds_for_two(self, node: "Node") -> Taken:
        sides = [child for child in node.children if child.is_named and child.type != "test_operator"]
        signs = [text_of(child) for child in node.children if not child.is_named or child.type == "test_operator"]
        if len(sides) != 2 or len(signs) != 1:
            return None
        [sign] = signs
        if sign in ("&&", "||"):
            first, second = map(self.holds, sides)
            return both(first, second) if sign == "&&" else negated(both(negated(first), negated(second)))
        left, right = map(self.known_text, sides)
        if left is None or right is None:
            return None
        if sign in ("=", "==", "!=") and not (left.isdigit() and right.isdigit()):
            return fnmatchcase(left, right) == (sign != "!=")
        if sign in _COMPARISONS and re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right):
            return _COMPARISONS[sign](int(left), int(right))
        return left == right if sign == "=" else None

    def known_text(self, node: "Node") -> str | None:
        """Return the text of a word in a condition, where unset variables are empty; None if it is not known."""
        inner = node
        while inner.type == "string" and inner.named_child_count == 1:
            inner = inner.named_children[0]
        if inner.type in ("simple_expansion", "expansion") and inner.named_child_count == 1:
            name = text_of(inner.named_children[0])
            if name not in self._variables and (name == "#" or re.fullmatch(r"\w+", name)):
                is_plain = inner.type == "simple_expansion" or inner.child_count == 3
                return None if not is_plain else "0" if name == "#" else ""
        text = self.value(node)
        return None if "$" in text or "`" in text else text

    def _joined(self, node: "Node", start: int, end: int) -> str:
        """Return the values of a node's parts between two places, and the text between these parts."""
        text, first, joined = node.text or b"", node.start_byte, ""
        for child in node.named_children:
            if child.start_byte >= start:
                joined += text[start - first : child.start_byte - first].decode() + self.value(child)
                start = child.end_byte
            if len(joined) > MAX_CHARACTERS:
                raise too_large()
        return joined + text[start - first : end - first].decode()

    def _expansion(self, node: "Node") -> str:
        """Return the value of ``$name``, or of ``${name...}`` with what follows the name; if unknown ``$name``."""
        name, *operators = [child for child in node.children if text_of(child) not in ("$", "${", "}")] or [node]
        if text_of(name) == "#" and operators:
            count = self._variables.get(text_of(operators[0]).partition("[")[0])
            return text_of(node) if count is None or operators[0].type != "subscript" else str(len(count))
        key, _, index = text_of(name).rstrip("]").partition("[")
        words, how = self._variables.get(key), text_of(operators[0]) if operators else ""
        known = None if words is None else words[int(index)] if index.isdigit() and int(index) < len(words) else None
        if words is not None and not index:
            known = words[0] if words else ""
        if how in (":-", ":=", "-", "=") and not known:
            default = self._joined(node, operators[0].end_byte, node.end_byte - 1)
            if how in (":=", "="):
                self._variables[key] = [default]
            return default
        if how in (":+", "+"):
            return self._joined(node, operators[0].end_byte, node.end_byte - 1) if known else ""
        if known is None and key in self._unused and not index:
            known = " ".join(self._unused[key])
        changed = None if known is None else _changed(known, how, node, self.value)
        return f"${key}" if changed is None else changed

    def _number(self, node: "Node") -> int | None:
        """Return the value of a sum or product; None if only the shell knows it."""
        if node.type == "parenthesized_expression":
            return self._number(node.named_children[0])
        if node.type == "binary_expression":
            left, sign, right = (node.child_by_field_name(name) for name in ("left", "operator", "right"))
            if left is None or sign is None or right is None:
                return None
            first, second, calculate = self._number(left), self._number(right), _OPERATORS.get(text_of(sign))
            if first is None or second is None or calculate is None:
                return None
            try:
                result = calculate(first, second)
            except ZeroDivisionError:
                return None
            return result if abs(result) < 2**63 else None
        text = self.value(node)
        text = self._variables.get(text, [text])[0]
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def _is_argument(words: list[str]) -> bool:
    return any(_POSITIONAL.search(word) for word in words)


def _changed(text: str, how: str, node: "Node", value: Callable[["Node"], str]) -> str | None:
    """Return a variable's text, changed as ``${name...}`` says; None for a change that is not supported."""
    if how in ("", ":-", ":=", "-", "=", ":?", "?"):
        return text
    if how in (",,", "^^"):
        return text.lower() if how == ",," else text.upper()
    parts = [value(child) for child in node.named_children[1:]]
    if how in ("%", "%%", "#", "##") and len(parts) == 1:
        ends = range(len(text) + 1) if how in ("%%", "#") else range(len(text), -1, -1)
        for end in ends:
            kept, cut = (text[:end], text[end:]) if how[0] == "%" else (text[end:], text[:end])
            if fnmatchcase(cut, parts[0]):
                return kept
        return text
    if how in ("/", "//") and parts and not re.search(r"[*?\[]", parts[0]):
        return text.replace(parts[0], "".join(parts[1:]), 1 if how == "/" else -1)
    return None
