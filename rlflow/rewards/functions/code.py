"""1 if the program in the response passes all tests of its row; 0 otherwise. Programs run in the sandbox.

The results are compared outside the sandbox: the program receives the inputs and never sees the expected outputs.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge

from rlflow.errors import first_line
from rlflow.rewards.base import Failure, Outcome, Row
from rlflow.rewards.sandbox.root import Limits
from rlflow.rewards.sandbox.run import Exit, LateSandboxError, SandboxError, run
from rlflow.schema import Count

# The groups are the backquotes, the language and the rest of the line, which is empty where a block ends.
_FENCE = re.compile(r"^ {0,3}(`{3,})[ \t]*(\w*)([^\n`]*)$", re.MULTILINE)
_LANGUAGES = frozenset({"python", "python3", "py"})
# The keys of a test, for a program and for a function.
_FORMS = ({"input", "output"}, {"call", "arguments", "result"})
_NO_RESULT = object()
_MAX_CHARACTERS = 2**20
# Seconds that a sandbox may take to start on busy cores.
_START_S = 1.0
# Appended to test a function: its arguments come as JSON on standard input, its result is the last line of output.
_CALL = """
import json as _json, sys as _sys
_result = {name}(*_json.load(_sys.stdin))
print()
print(_json.dumps(_result))
"""


def prepare(*, memory_mib: int = Limits.memory_mib, num_processes: int = Limits.num_processes) -> None:
    """Check that the sandbox works here and that Python starts within the limits. Raises SandboxError."""
    try:
        ended = run("print(1)", b"", Limits(timeout_s=10.0, memory_mib=memory_mib, num_processes=num_processes))
    except SandboxError as error:
        raise SandboxError(f"{error}; see docs/rewards.md for what a host must allow") from error
    if ended != Exit("exited", 0, b"1\n"):
        fact = f"Python does not start in the sandbox ({ended.reason}, code {ended.code})"
        raise SandboxError(f"{fact}: memory_mib is {memory_mib}, num_processes is {num_processes}")


def check_row(row: Row) -> Failure | None:
    """Return why the row has no tests; None if it has."""
    try:
        tests = _tests(row)
    except (ValueError, TypeError) as error:
        return Failure("unreadable", f"cannot use 'tests' of the row ({first_line(error)})")
    for test in tests:
        if not isinstance(test, Mapping) or not any(pair <= test.keys() for pair in _FORMS):
            fact = f"expected input and output, or call, arguments and result, got {str(test)[:80]}"
            return Failure("unreadable", f"cannot use 'tests' of the row ({fact})")
    return None


def reward(
    texts: Sequence[str],
    rows: Sequence[Row],
    *,
    timeout_s: float,
    memory_mib: Annotated[int, Ge(64)] = Limits.memory_mib,
    num_processes: Count = Limits.num_processes,
) -> list[Outcome]:
    """Run each response's program with the tests of its row.

    The row's ``tests`` are a list, or its JSON, of ``{"input": text, "output": text}`` for programs or
    ``{"call": name, "arguments": [...], "result": ...}`` for functions. The program is the response's last code block
    that is marked as Python, or else the last one without a language. ``timeout_s`` applies to all tests together.
    A program may use ``memory_mib`` of memory, and ``num_processes`` processes and threads.
    """
    limits = {"memory_mib": memory_mib, "num_processes": num_processes}
    return [
        _grade(text, _tests(row), time.monotonic() + timeout_s, limits) for text, row in zip(texts, rows, strict=True)
    ]


def _tests(row: Row) -> list[Mapping[str, Any]]:
    column = row.get("tests")
    tests: list[Mapping[str, Any]] = json.loads(column) if isinstance(column, str) else list(column or ())
    if not tests:
        raise ValueError("the row has no tests")
    return tests


def _grade(text: str, tests: Sequence[Mapping[str, Any]], deadline: float, limits: Mapping[str, int]) -> Outcome:
    program = _program(text)
    try:
        return float(
            program is not None
            and all(_passes(program, test, deadline, limits, is_first=not number) for number, test in enumerate(tests))
        )
    except SandboxError as error:
        return Failure("unavailable", f"has no sandbox ({error})")


def _program(text: str) -> str | None:
    """Return the last code block that is closed, in a single pass because a response may be full of fences."""
    last: dict[bool, str] = {}
    opened = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif len(fence[1]) >= len(opened[1]) and not (fence[2] + fence[3]).strip():
            language = opened[2].lower()
            if not language or language in _LANGUAGES:
                last[bool(language)] = text[opened.end() + 1 : fence.start()]
            opened = None
    return last.get(True, last.get(False))


def _passes(
    program: str, test: Mapping[str, Any], deadline: float, limits: Mapping[str, int], *, is_first: bool
) -> bool:
    # A row that comes from a table has all keys, some of them null.
    is_function = test.get("call") is not None
    if is_function:
        program += _CALL.format(name=test["call"])
        stdin, expected = json.dumps(test["arguments"]), test["result"]
    else:
        stdin, expected = test["input"], test["output"]
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        return False
    try:
        ended = run(program, stdin.encode(), Limits(timeout_s=remaining, **limits))
    except LateSandboxError:
        if is_first or remaining > _START_S:
            raise
        return False  # the tests before have left too little time
    if ended.reason != "exited" or ended.code != 0:
        return False
    output = ended.output.decode(errors="replace")
    return bool(_result(output) == expected) if is_function else _same_lines(output, expected)


def _same_lines(output: str, expected: str) -> bool:
    """Return whether all lines are equal, ignoring spaces at their ends and empty lines at the end."""
    output, expected = output.rstrip(), expected.rstrip()
    # Counting millions of lines is fast; comparing them is not.
    return output.count("\n") == expected.count("\n") and all(
        line.rstrip() == other.rstrip() for line, other in zip(output.split("\n"), expected.split("\n"), strict=True)
    )


def _result(output: str) -> Any:
    """Return the function's result from the last line of output, whatever the program printed there."""
    try:
        return json.loads(output.rstrip().rpartition("\n")[2][:_MAX_CHARACTERS])
    except (ValueError, RecursionError):
        return _NO_RESULT
