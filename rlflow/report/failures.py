"""What could not be judged, and why: ``failures.jsonl``."""

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from rlflow.compiler.plan import Plan
from rlflow.report.lines import keep_until
from rlflow.runtime.base import Observer, Report

# Reasons that are said as they come; more are only counted.
_SAID = 5


class Failures(Observer):
    """A line a step and node, and on the console each reason when it is the first of its kind."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._path = Path()
        self._seen: set[tuple[str, str]] = set()
        self._count = 0

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._path = directory / "failures.jsonl"
        if self._path.exists():
            keep_until(self._path, step)

    def failed(self, step: int, node: str, reasons: Mapping[str, int]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "node": node, "reasons": reasons}) + "\n")
        self._count += sum(reasons.values())
        for reason, count in reasons.items():
            if (node, reason) not in self._seen and len(self._seen) < _SAID:
                self._seen.add((node, reason))
                self._console.print(f"step {step:>5}  {node}: {reason} ({count})", soft_wrap=True, markup=False)

    def ended(self, report: Report) -> None:
        if self._count:
            self._console.print(f"failed to be judged: {self._count} responses, see {self._path}", soft_wrap=True)
