"""Reports engines that were slower than the others, or were replaced, from ``engines.jsonl``."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from rlflow.compiler.plan import Plan
from rlflow.report.records import read_lines, remove_lines_after
from rlflow.runtime.protocols import Observer, Report

# An engine lags if the others were idle for this share of its time.
_LAG_SHARE = 0.05
# Relative to the median speed, and the share of the KV cache in use.
_SLOW_SPEED, _FULL_CACHE = 0.85, 0.95

Line = Mapping[str, Any]


class EngineReport(Observer):
    """A display at the end of a run: which engines others waited for, and which ones were replaced."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._path = Path()

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._path = directory / "engines.jsonl"
        if self._path.exists():
            remove_lines_after(self._path, step)

    def ended(self, report: Report) -> None:
        if self._path.exists():
            lines = read_lines(self._path)
            for text in [*describe_replaced(lines), *describe_lagging(lines)]:
                self._console.print(text, soft_wrap=True, markup=False)


def describe_replaced(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for each engine that failed and was replaced."""
    failures = [line for line in lines if "failed" in line]
    return [
        f"{line['role']}: engine {line['engine']} replaced in step {line['step']}: {line['failed']}"
        for line in failures
    ]


def describe_lagging(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for each role whose engines waited for one of them."""
    steps: dict[str, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in [line for line in lines if "failed" not in line]:
        steps[line["role"]][line["step"]].append(line)
    return [text for role, role_steps in steps.items() if (text := _describe_role(role, role_steps)) is not None]


def _describe_role(role: str, steps: Mapping[int, Sequence[Line]]) -> str | None:
    lags: Counter[int] = Counter()
    waits: dict[int, list[float]] = defaultdict(list)
    causes: dict[int, Counter[str]] = defaultdict(Counter)
    for lines in steps.values():
        busy_seconds: dict[int, float] = defaultdict(float)
        for line in lines:
            busy_seconds[line["engine"]] += line["seconds"]
        last = max(busy_seconds, key=lambda engine: busy_seconds[engine])
        earlier = [seconds for engine, seconds in busy_seconds.items() if engine != last]
        if earlier and (wait := busy_seconds[last] - sum(earlier) / len(earlier)) > _LAG_SHARE * busy_seconds[last]:
            lags[last] += 1
            waits[last].append(wait / busy_seconds[last])
            causes[last][_cause(last, lines)] += 1
    if not lags:
        return None
    engine, count = lags.most_common(1)[0]
    cause = causes[engine].most_common(1)[0][0]
    return (
        f"{role}: engine {engine} lags in {count} of {len(steps)} steps, others wait {median(waits[engine]):.0%} of its"
        f" time: {cause}"
    )


def _cause(engine: int, lines: Sequence[Line]) -> str:
    engine_lines = [line for line in lines if line["engine"] == engine]
    full = sum(line["seconds"] for line in engine_lines if line["cache"] >= _FULL_CACHE or line["preemptions"])
    if full > _LAG_SHARE * sum(line["seconds"] for line in engine_lines):
        return "its KV cache is full"
    numbers = {line["engine"] for line in lines}
    speeds = {number: _speed([line for line in lines if line["engine"] == number]) for number in numbers}
    if speeds[engine] < _SLOW_SPEED * median(speeds.values()):
        return f"it generates {speeds[engine]:.0f} tokens/s per response, the median is {median(speeds.values()):.0f}"
    return "it has the longest responses"


def _speed(lines: Sequence[Line]) -> float:
    """Return tokens per second and running response."""
    tokens: float = sum(line["tokens"] for line in lines)
    seconds: float = sum(line["seconds"] * line["running"] for line in lines)
    return tokens / max(seconds, 1e-9)
