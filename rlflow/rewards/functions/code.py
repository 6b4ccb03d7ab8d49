"""1 where the program in the response passes all tests of its row, in the sandbox.

Tests are compared out here: the program gets their input, and never what is expected of it.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge

from rlflow.rewards.base import Failure, Outcome, Row
from rlflow.rewards.sandbox.root import Limits
from rlflow.rewards.sandbox.run import Ended, SandboxError, run

# Its backquotes, the language, and what else stands there: nothing, where a block ends.
_FENCE = re.compile(r"^ {0,3}(`{3,})[ \t]*(\w*)([^\n`]*)$", re.MULTILINE)
_LANGUAGES = frozenset({"python", "python3", "py"})
_NOTHING = object()
_MOST_CHARACTERS = 2**20
# For a test of a function: its arguments come as JSON, its result goes as the last line.
_CALL = """
import json as _json, sys as _sys
_result = {name}(*_json.load(_sys.stdin))
print()
print(_json.dumps(_result))
"""


def prepare(*, memory_mib: int = Limits.memory_mib, num_processes: int = Limits.num_processes) -> None:
    """Raises SandboxError on a host that does not allow it, or where Python does not start within the limits."""
    try:
        ended = run("print(1)", b"", Limits(timeout_s=10.0, memory_mib=memory_mib, num_processes=num_processes))
    except SandboxError as error:
        raise SandboxError(f"{error}; docs/rewards.md says what a host must allow") from error
    if ended != Ended("exited", 0, b"1\n"):
        fact = f"Python does not start in the sandbox ({ended.how}, code {ended.code})"
        raise SandboxError(f"{fact}: memory_mib is {memory_mib}, num_processes {num_processes}")


def reward(
    texts: Sequence[str],
    rows: Sequence[Row],
    *,
    timeout_s: float,
    memory_mib: Annotated[int, Ge(64)] = Limits.memory_mib,
    num_processes: Annotated[int, Ge(1)] = Limits.num_processes,
) -> list[Outcome]:
    """The row needs ``tests``, a list or its JSON, of ``{"input": text, "output": text}`` for programs, or
    ``{"call": name, "arguments": [...], "result": ...}`` for functions. The program is the response's last block that
    is marked as Python, or else the last without a mark. ``timeout_s`` is for all tests together."""
    limits = {"memory_mib": memory_mib, "num_processes": num_processes}
    return [
        _graded(text, _tests(row), time.monotonic() + timeout_s, limits) for text, row in zip(texts, rows, strict=True)
    ]


def _tests(row: Row) -> list[Mapping[str, Any]]:
    given = row.get("tests")
    tests: list[Mapping[str, Any]] = json.loads(given) if isinstance(given, str) else list(given or ())
    if not tests:
        raise ValueError("the row has no tests")
    return tests


def _graded(text: str, tests: Sequence[Mapping[str, Any]], until: float, limits: Mapping[str, int]) -> Outcome:
    program = _program(text)
    try:
        return float(program is not None and all(_passes(program, test, until, limits) for test in tests))
    except SandboxError as error:
        return Failure("unavailable", f"has no sandbox ({error})")


def _program(text: str) -> str | None:
    """Of blocks that end; in one line after the other, since a response may be nothing but fences."""
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


def _passes(program: str, test: Mapping[str, Any], until: float, limits: Mapping[str, int]) -> bool:
    # A table gives all of its rows all keys.
    is_function = test.get("call") is not None
    if is_function:
        program += _CALL.format(name=test["call"])
        given, wanted = json.dumps(test["arguments"]), test["result"]
    else:
        given, wanted = test["input"], test["output"]
    left = until - time.monotonic()
    if left <= 0:
        return False
    ended = run(program, given.encode(), Limits(timeout_s=left, **limits))
    if ended.how != "exited" or ended.code != 0:
        return False
    output = ended.output.decode(errors="replace")
    return bool(_result(output) == wanted) if is_function else _same_lines(output, wanted)


def _same_lines(output: str, wanted: str) -> bool:
    """But for the spaces at their ends, and empty ones at the end."""
    output, wanted = output.rstrip(), wanted.rstrip()
    # Millions of lines take long to compare, and none to count.
    return output.count("\n") == wanted.count("\n") and all(
        line.rstrip() == other.rstrip() for line, other in zip(output.split("\n"), wanted.split("\n"), strict=True)
    )


def _result(output: str) -> Any:
    """What the program says that its function returned: whatever that is, it is not taken amiss."""
    try:
        return json.loads(output.rstrip().rpartition("\n")[2][:_MOST_CHARACTERS])
    except (ValueError, RecursionError):
        return _NOTHING
