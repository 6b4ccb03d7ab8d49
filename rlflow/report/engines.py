"""Which engine lags in writing, which ones failed, and why: from ``engines.jsonl``."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from rlflow.compiler.plan import Plan
from rlflow.report.records import keep_until, read_lines
from rlflow.runtime.protocols import Observer, Report

# An engine lags where others have had nothing to write for this share of its time.
_SHARE = 0.05
_SLOWER, _FULL = 0.85, 0.95

Line = Mapping[str, Any]


class EngineReport(Observer):
    """Says at the end of a run, for each role with several engines that write, which one the others waited for, and
    which ones were replaced."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._path = Path()

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._path = directory / "engines.jsonl"
        if self._path.exists():
            keep_until(self._path, step)

    def ended(self, report: Report) -> None:
        if self._path.exists():
            lines = read_lines(self._path)
            for text in [*replaced(lines), *lagging(lines)]:
                self._console.print(text, soft_wrap=True, markup=False)


def replaced(lines: Sequence[Line]) -> list[str]:
    """A sentence for each engine that failed."""
    failures = [line for line in lines if "failed" in line]
    return [
        f"{line['role']}: engine {line['engine']} replaced in step {line['step']}: {line['failed']}"
        for line in failures
    ]


def lagging(lines: Sequence[Line]) -> list[str]:
    """A sentence for each role with an engine that lags."""
    steps: dict[str, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in [line for line in lines if "failed" not in line]:
        steps[line["role"]][line["step"]].append(line)
    return [text for role, of_role in steps.items() if (text := _of_role(role, of_role)) is not None]


def _of_role(role: str, steps: Mapping[int, Sequence[Line]]) -> str | None:
    lags: Counter[int] = Counter()
    waits: dict[int, list[float]] = defaultdict(list)
    causes: dict[int, Counter[str]] = defaultdict(Counter)
    for lines in steps.values():
        worked: dict[int, float] = defaultdict(float)
        for line in lines:
            worked[line["engine"]] += line["seconds"]
        last = max(worked, key=lambda engine: worked[engine])
        others = [seconds for engine, seconds in worked.items() if engine != last]
        if others and (wait := worked[last] - sum(others) / len(others)) > _SHARE * worked[last]:
            lags[last] += 1
            waits[last].append(wait / worked[last])
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
    own = [line for line in lines if line["engine"] == engine]
    full = sum(line["seconds"] for line in own if line["cache"] >= _FULL or line["preemptions"])
    if full > _SHARE * sum(line["seconds"] for line in own):
        return "its cache is full"
    speeds = {each: _speed([line for line in lines if line["engine"] == each]) for each in {e["engine"] for e in lines}}
    if speeds[engine] < _SLOWER * median(speeds.values()):
        return f"it writes {speeds[engine]:.0f} tokens/s of a response where others write {median(speeds.values()):.0f}"
    return "it has the longest responses"


def _speed(lines: Sequence[Line]) -> float:
    """Tokens a second of each response that was being written."""
    tokens: float = sum(line["tokens"] for line in lines)
    seconds: float = sum(line["seconds"] * line["running"] for line in lines)
    return tokens / max(seconds, 1e-9)
