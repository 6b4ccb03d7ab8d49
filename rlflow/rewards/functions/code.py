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
from rlflow.rewards.sandbox.limits import Limits
from rlflow.rewards.sandbox.run import SandboxError, run

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_NOTHING = object()
_MOST_CHARACTERS = 2**20
# For a test of a function: its arguments come as JSON, its result goes as the last line.
_CALL = """
import json as _json, sys as _sys
_result = {name}(*_json.load(_sys.stdin))
print()
print(_json.dumps(_result))
"""


def prepare() -> None:
    """Raises SandboxError on a host that does not allow it."""
    try:
        run("", b"", Limits(timeout_s=10.0))
    except SandboxError as error:
        raise SandboxError(f"{error}; docs/rewards.md says what a host must allow") from error


def reward(
    texts: Sequence[str],
    rows: Sequence[Row],
    *,
    timeout_s: float,
    memory_mib: Annotated[int, Ge(64)] = 1024,
    num_processes: Annotated[int, Ge(1)] = 32,
) -> list[Outcome]:
    """The row needs ``tests``, a list or its JSON, of ``{"input": text, "output": text}`` for programs, or
    ``{"call": name, "arguments": [...], "result": ...}`` for functions. The program is the last block of Python in the
    response. ``timeout_s`` is for all tests together."""
    limits = {"memory_mib": memory_mib, "num_processes": num_processes}
    return [
        _graded(text, _tests(row), time.monotonic() + timeout_s, limits) for text, row in zip(texts, rows, strict=True)
    ]


def _tests(row: Row) -> list[Mapping[str, Any]]:
    tests: list[Mapping[str, Any]] = json.loads(row["tests"]) if isinstance(row["tests"], str) else list(row["tests"])
    if not tests:
        raise ValueError("the row has no tests")
    return tests


def _graded(text: str, tests: Sequence[Mapping[str, Any]], until: float, limits: Mapping[str, int]) -> Outcome:
    blocks = _BLOCK.findall(text)
    try:
        return float(bool(blocks) and all(_passes(blocks[-1], test, until, limits) for test in tests))
    except SandboxError as error:
        return Failure("unavailable", f"has no sandbox ({error})")


def _passes(program: str, test: Mapping[str, Any], until: float, limits: Mapping[str, int]) -> bool:
    # A table gives all of its rows all keys.
    is_function = test.get("call") is not None
    if is_function:
        program += _CALL.format(name=test["call"])
        given, wanted = json.dumps(test["arguments"]), test["result"]
    else:
        given, wanted = test["input"], _lines(test["output"])
    left = until - time.monotonic()
    if left <= 0:
        return False
    ended = run(program, given.encode(), Limits(timeout_s=left, **limits))
    if ended.how != "exited" or ended.code != 0:
        return False
    output = ended.output.decode(errors="replace")
    return bool((_result(output) if is_function else _lines(output)) == wanted)


def _lines(text: str) -> list[str]:
    """Without the spaces at their ends, and empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _result(output: str) -> Any:
    """What the program says that its function returned: whatever that is, it is not taken amiss."""
    try:
        return json.loads(output.rstrip().rpartition("\n")[2][:_MOST_CHARACTERS])
    except (ValueError, RecursionError):
        return _NOTHING
