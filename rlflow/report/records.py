"""Files that a run writes line by line (metrics, samples, failures), and the tuning table.

A resumed run repeats the steps after its last checkpoint, so their lines are removed first.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rlflow.batch.sample import Sample
from rlflow.compiler.plan import Plan
from rlflow.errors import storage_error
from rlflow.recipe.evaluation import PREFIX
from rlflow.runtime.protocols import Observer, Report
from rlflow.runtime.tuning import FILE
from rlflow.system.text_files import append_lines, replace_text

METRICS = "metrics.jsonl"
"""The name of the file with the metrics of a run, in its folder."""


def thumbnail_file(directory: Path, digest: str) -> Path:
    """Return the file with a small picture of an image in the folder of a run."""
    return directory / "images" / f"{digest}.jpg"


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the JSON objects in the file; skip other lines, such as the last one of a killed run."""
    parsed = [_parse(line) for line in path.read_text("utf-8", errors="replace").split("\n")]
    return [line for line in parsed if line is not None]


def remove_lines_after(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``, and lines that are not JSON objects with a step."""
    lines = path.read_text("utf-8", errors="replace").split("\n") if path.exists() else []
    replace_text(path, "".join(f"{line}\n" for line in lines if _line_step(line) <= step))


def _line_step(line: str) -> float:
    """Return the step of a line; infinity if it has none."""
    step = (_parse(line) or {}).get("step")
    return step if isinstance(step, int) else math.inf


def _parse(line: str) -> Mapping[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


# The number of different reasons that are printed; later ones are only counted.
_MAX_PRINTED = 5


class FailureLog(Observer):
    """A log of rewards that failed: a line per step and node in ``failures.jsonl``, and new reasons on the console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._path = Path()
        self._printed: set[tuple[str, str]] = set()
        self._count = 0

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._path = directory / "failures.jsonl"
        self._count = 0
        if self._path.exists():
            remove_lines_after(self._path, step)
            self._count = sum(sum(line["reasons"].values()) for line in read_lines(self._path))

    def failed(self, step: int, node: str, reasons: Mapping[str, int]) -> None:
        append_lines(self._path, [json.dumps({"step": step, "node": node, "reasons": reasons})])
        self._count += sum(reasons.values())
        for reason, count in reasons.items():
            if (node, reason) not in self._printed and len(self._printed) < _MAX_PRINTED:
                self._printed.add((node, reason))
                self._console.print(f"step {step:>5}  {node}: {reason} ({count})", soft_wrap=True, markup=False)

    def ended(self, report: Report) -> None:
        if self._count:
            self._console.print(f"{self._count} responses have no reward, see {self._path}", soft_wrap=True)


class SampleLog(Observer):
    """A log of a few samples of each step, for people to read, in ``samples.jsonl``.

    Small pictures of their images are in the folder ``images``, named by the digests of the images.
    """

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._path = directory / "samples.jsonl"
        if self._path.exists():
            remove_lines_after(self._path, step)

    def sampled(self, samples: Sequence[Sample]) -> None:
        for image in {image for sample in samples for image in sample.images}:
            _write_thumbnail(thumbnail_file(self._path.parent, image.digest), image.encoded)
        append_lines(self._path, [json.dumps(sample.to_dict(), ensure_ascii=False) for sample in samples])


def _write_thumbnail(file: Path, encoded: bytes) -> None:
    """Write a small picture, unless it is there. Raises StorageError."""
    try:
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            file.write_bytes(encoded)
    except OSError as error:
        raise storage_error(error, file) from error


class EventLog(Observer):
    """A log of the warnings of a run and of the steps from which it resumed, in ``events.jsonl``."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._early: list[str] = []
        self._step = 0

    def warned(self, warning: str) -> None:
        if self._path is None:
            self._early.append(warning)
        else:
            self._write("warning", warning)

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._path, self._step = directory / "events.jsonl", step
        if step:
            self._write("resumed", f"resumed after step {step}")
        while self._early:
            self._write("warning", self._early.pop(0))

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step

    def close(self) -> None:
        self._path = None

    def _write(self, kind: str, text: str) -> None:
        assert self._path is not None
        append_lines(self._path, [json.dumps({"step": self._step, "at": time.time(), "kind": kind, "text": text})])


class MetricsWriter(Observer):
    """A log of the metrics of each step and evaluation, in ``metrics.jsonl``."""

    def __init__(self) -> None:
        self._path: Path
        self._evaluated: dict[int, Mapping[str, Any]] = {}
        """The lines of evaluations, by step. The run may make one after the last checkpoint's step again."""

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._path = directory / METRICS
        remove_lines_after(self._path, step)
        self._evaluated = {line["step"]: line for line in read_lines(self._path) if is_evaluation(line)}

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        line = {"step": step, **metrics}
        if self._evaluated.get(step) == line:
            return
        if step in self._evaluated:
            self._remove_evaluation(step)
        self._write(step, metrics)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step, metrics)

    def _remove_evaluation(self, step: int) -> None:
        lines = [line for line in read_lines(self._path) if line["step"] != step or not is_evaluation(line)]
        replace_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        append_lines(self._path, [json.dumps({"step": step, **metrics})])


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics is one of an evaluation, and not one of a step."""
    return "seconds" not in line and any(name.startswith(PREFIX) for name in line)


def tuning_table(directory: Path) -> Table | str:
    """Return a table of the settings that tuning tried in ``directory``, or a line why there were none."""
    results = json.loads((directory / FILE).read_text())
    if not results:
        return "nothing to tune: every micro_batch_tokens is pinned, and no engine can change its number of sequences"
    if not any(entry["trials"] for entry in results.values()):
        return "nothing was tuned: the first trial takes three steps"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in ("role", "setting", "", "tokens/s", "predicted", "memory", "predicted", "gain"):
        table.add_column(heading)
    for role, entry in results.items():
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
                _format(predicted["tokens_per_second"], "{:.0f}") if planned else "",
                _format(trial["memory_share"] or None, "{:.0%}"),
                _format(predicted["memory_share"], "{:.0%}") if planned else "",
                _format(gain, "{:+.0%}"),
                style="bold" if best else None,
            )
    return table


def _format(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
