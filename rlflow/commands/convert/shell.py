"""Commands of a shell script, with the script's own variables, arrays and sums filled in. Nothing is run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rlflow.commands.convert.shell_values import MAX_CHARACTERS, ShellValues, Taken, both, negated, text_of, too_large
from rlflow.errors import RecipeError
from rlflow.extras import check_extra

if TYPE_CHECKING:
    from tree_sitter import Node

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_UNBRACED = re.compile(rb"(?<![\\$])\$([A-Za-z_]\w*)")
_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
# A command in one word, as for bash -c, sbatch --wrap or ray job submit.
_INNER = re.compile(r"(?:^|.*?[\s=;])python[\d.]*\s.*", re.DOTALL)
_PRINTING = {"echo", "printf", "cat", ":"}
_MAX_DEPTH = 4


@dataclass
class Script:
    """The commands of a shell script."""

    commands: list[list[str]] = field(default_factory=list)
    """The words of each command, as the shell would pass them on. What only the shell knows stays: ``$HOME``."""
    skipped_commands: list[list[str]] = field(default_factory=list)
    """The commands of branches that are not taken when the script is started as it is."""
    choices: dict[str, list[str]] = field(default_factory=dict)
    """The values of each variable that branches change. The first of them is the one filled in."""


def read_script(text: str) -> Script:
    """Read a script for bash or sh. All branches are read, in their order.

    Raises RecipeError if the script is too large, and if the library that reads it is not installed.
    """
    check_extra("tree-sitter-bash", "script", "the converter")
    # A carriage return would end up in the last argument of each line.
    text = text.replace("\r\n", "\n")
    if _CONTROL.search(text):
        raise RecipeError("script", "has control characters", fix="text without them")
    reader = _Reader()
    try:
        reader.read_text(text, True)
        reader.read_uncalled_functions()
    except RecursionError:
        raise RecipeError("script", "is nested too deeply", fix="keep the command that trains") from None
    choices = reader.values.choices.items()
    reader.script.choices = {name: [" ".join(words) for words in values] for name, values in choices if values[1:]}
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


class _Reader:
    """Walks through the statements of a script, and the scripts that it starts."""

    def __init__(self) -> None:
        self.script = Script()
        self.values = ShellValues()
        self._depth = 0
        self._functions: dict[str, Node] = {}
        self._called: set[str] = set()

    def read_text(self, text: str, taken: Taken) -> None:
        """Add the commands of a script, or of one inside of it."""
        import tree_sitter_bash
        from tree_sitter import Language, Parser

        if len(text) > MAX_CHARACTERS:
            raise too_large()
        parser, script = Parser(Language(tree_sitter_bash.language())), text.encode()
        # The library splits $A/$B/c into two words, but not ${A}/${B}/c.
        braced = _with_braces(script, parser.parse(script).root_node)
        self._depth += 1
        self._read(parser.parse(braced).root_node, taken)
        self._depth -= 1

    def read_uncalled_functions(self) -> None:
        """Add the commands of functions that nothing calls, as those of a branch that is not taken."""
        for name in self._functions.keys() - self._called:
            self._read(self._functions[name], False)

    def _read(self, node: "Node", taken: Taken) -> None:
        """Add the commands of a part of the script."""
        match node.type:
            case "variable_assignment":
                self._read_assignment(node, taken)
            case "command":
                self._read_command(node, taken)
            case "if_statement":
                self._read_if(node, taken)
            case "case_statement":
                self._read_case(node, taken)
            case "while_statement" | "for_statement" | "c_style_for_statement":
                self._read_loop(node, taken)
            case "list":
                self._read_list(node, taken)
            case "function_definition":
                name, body = (node.child_by_field_name(field) for field in ("name", "body"))
                if name is not None and body is not None:
                    self._functions[text_of(name)] = body
            case _:
                for child in node.named_children:
                    self._read(child, taken)
                if node.type == "redirected_statement":
                    self._read_words_after_files(node, taken)

    def _read_if(self, node: "Node", taken: Taken) -> None:
        """Read the branches: the first whose condition holds is the one that is taken."""
        branches = [node, *(child for child in node.named_children if child.type in ("elif_clause", "else_clause"))]
        for branch in branches:
            condition, *body = [child for child in branch.named_children if child not in branches]
            holds: Taken = True
            if branch.type == "else_clause":
                body = [condition, *body]
            else:
                holds = self.values.holds(condition)
                self._read(condition, None)
            for child in body:
                self._read(child, both(taken, holds))
            taken = both(taken, negated(holds))

    def _read_case(self, node: "Node", taken: Taken) -> None:
        word, *items = node.named_children
        text = self.values.known_text(word)
        for item in items:
            patterns = item.children_by_field_name("value")
            texts = [self.values.value(pattern) for pattern in patterns]
            holds = None if text is None else any(fnmatchcase(text, pattern) for pattern in texts)
            for child in item.named_children:
                if child not in patterns:
                    self._read(child, both(taken, holds))
            taken = both(taken, negated(holds))

    def _read_loop(self, node: "Node", taken: Taken) -> None:
        taken = both(taken, None)
        children = node.named_children
        if node.type == "while_statement":
            taken = both(taken, self.values.holds(children[0]))
        elif node.type == "for_statement":
            name, *values = (child for child in children if child.type != "do_group")
            for value in values:
                for word in self.values.words(value):
                    self.values.assign(text_of(name), [word], taken)
        for child in children:
            self._read(child, taken)

    def _read_list(self, node: "Node", taken: Taken) -> None:
        """Read ``first && second`` and ``first || second``."""
        first, second = node.named_children[0], node.named_children[-1]
        self._read(first, taken)
        holds = self.values.holds(first)
        is_and = any(child.type == "&&" for child in node.children)
        self._read(second, both(taken, holds if is_and else negated(holds)))

    def _read_command(self, node: "Node", taken: Taken) -> None:
        words: list[str] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._read_assignment(child, taken)
            elif "redirect" not in child.type:
                words += self.values.words(child)
        if words and words[0] in _DECLARATIONS:
            for name, _, value in (word.partition("=") for word in words[1:] if "=" in word):
                self.values.assign(name, [value], taken)
        if sum(map(len, words)) > MAX_CHARACTERS:
            raise too_large()
        if words and words[0] in self._functions and self._depth < _MAX_DEPTH:
            self._call(words[0], words[1:], taken)
            return
        if words and words[0] == "shift" and taken:
            self.values.shift_arguments(int(words[1]) if words[1:] and words[1].isdigit() else 1)
        inner = [] if not words or words[0] in _PRINTING else [word for word in words if _INNER.fullmatch(word)]
        if words and words[0] == "eval":
            inner = [" ".join(words[1:])]
        if inner and self._depth < _MAX_DEPTH:
            for text in inner:
                self.read_text(re.sub(r"^--?[\w-]+=", "", text), taken)
            return
        (self.script.skipped_commands if taken is False else self.script.commands).append(words)

    def _call(self, name: str, arguments: list[str], taken: Taken) -> None:
        """Read the commands of a function, with the arguments of this call."""
        self._called.add(name)
        before = self.values.pass_arguments(arguments)
        self._depth += 1
        self._read(self._functions[name], taken)
        self._depth -= 1
        self.values.pass_arguments(before)

    def _read_words_after_files(self, node: "Node", taken: Taken) -> None:
        """Add words after the file of a redirection, which belong to the command before it."""
        commands = self.script.skipped_commands if taken is False else self.script.commands
        for redirect in node.named_children[1:] if commands else ():
            for word in redirect.children_by_field_name("destination")[1:]:
                commands[-1] += self.values.words(word)

    def _read_assignment(self, node: "Node", taken: Taken) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return
        is_array = value is not None and value.type == "array"
        if value is not None and is_array:
            parts = [child for child in value.named_children if child.type != "comment"]
            words = [word for child in parts for word in self.values.words(child)]
        else:
            words = [self.values.value(value) if value else ""]
        if any(text_of(child) == "+=" for child in node.children):
            self.values.append(text_of(name), words, taken, is_array=is_array)
        else:
            self.values.assign(text_of(name), words, taken)
