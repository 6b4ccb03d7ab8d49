"""Files with a line of JSON a step, of which a resumed run does the last steps again.

What could not be judged, and why: ``failures.jsonl``.

metrics.jsonl and TensorBoard events.

What tuning found, next to what was predicted.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table

from rlflow.compiler.plan import Plan
from rlflow.runtime.protocols import Observer, Report
from rlflow.runtime.tuning import FILE


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the objects in the file, without lines that are not JSON objects, as the half line of a killed run."""
    parsed = [_parsed(line) for line in path.read_text(errors="replace").splitlines()]
    return [line for line in parsed if line is not None]


def keep_until(path: Path, step: int) -> None:
    """Remove the lines of later steps than ``step``, and those that are not JSON objects with a step."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    beside = path.with_suffix(".writing")
    beside.write_text("".join(f"{line}\n" for line in lines if _step_of(line) <= step))
    beside.rename(path)


def _step_of(line: str) -> float:
    """Return the step of a line; infinity where it has none."""
    step = (_parsed(line) or {}).get("step")
    return step if isinstance(step, int) else math.inf


def _parsed(line: str) -> Mapping[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


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


class MetricsWriter(Observer):
    """A line a step and a line an evaluation, in ``metrics.jsonl``; the same as TensorBoard events."""

    def __init__(self) -> None:
        self._file: IO[str]
        self._events: Any
        self._evaluated: str

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._evaluated = f"evaluation/{plan.graph.evaluation_metric}"
        path = directory / "metrics.jsonl"
        keep_until(path, step)
        self._file = path.open("a")
        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)

    def evaluated(self, step: int, figure: float) -> None:
        self._write(step, {self._evaluated: figure})

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step, metrics)

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)


def tuning_table(directory: Path) -> Table | str:
    """Of the run in ``directory``; a line that says why where nothing was tuned."""
    found = json.loads((directory / FILE).read_text())
    if not found:
        return "nothing to tune: every micro_batch_tokens is pinned, and no engine takes more sequences while it writes"
    if not any(entry["trials"] for entry in found.values()):
        return "nothing tuned: the first trial takes three steps"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in ("role", "setting", "", "tokens/s", "predicted", "memory", "predicted", "gain"):
        table.add_column(heading)
    for role, entry in found.items():
        predicted, trials = entry["predicted"], entry["trials"]
        first = next((trial for trial in trials if trial["setting"] == entry["planned"]), None)
        for trial in trials:
            planned, best = trial is first, trial["setting"] == entry["best"]
            rate = first["tokens_per_second"] if first and not planned else 0
            gain = trial["tokens_per_second"] / rate - 1 if rate else None
            table.add_row(
                role if trial is trials[0] else "",
                entry["setting"] if trial is trials[0] else "",
                f"{trial['setting']}{' (planned)' if planned else ''}{' (kept)' if best else ''}",
                f"{trial['tokens_per_second']:.0f}",
                _written(predicted["tokens_per_second"], "{:.0f}") if planned else "",
                _written(trial["memory_share"] or None, "{:.0%}"),
                _written(predicted["memory_share"], "{:.0%}") if planned else "",
                _written(gain, "{:+.0%}"),
                style="bold" if best else None,
            )
    return table


def _written(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
