"""The figures of a run, read from the files in its folder, also while the run still writes them."""

import math
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from rlflow.errors import RecipeError
from rlflow.report.records import METRICS, thumbnail_file
from rlflow.report.run_readers import GrowingFile, read_document
from rlflow.report.run_records import (
    ENGINE,
    EVENT,
    METRICS_LINE,
    PLAN,
    REPORT,
    SAMPLE,
    ActivityRecord,
    EventRecord,
    PlanRecord,
    ReplacementRecord,
    ReportRecord,
    SampleRecord,
)
from rlflow.system.folder_lock import is_locked

T = TypeVar("T")
Event = Mapping[str, Any]

# The points of a curve and the steps with samples that a page shows at most, so that it stays small for long runs.
_POINTS, _SAMPLED_STEPS = 400, 40
# The small pictures of images on a page, at most, and the bytes of each.
_THUMBNAILS, _THUMBNAIL_BYTES = 200, 2**14
# The characters of a prompt or a response on the page, at most.
_CHARACTERS = 4000
# The last steps whose nodes are shown, and the seconds of engines' work.
_STEPS, _SECONDS = 5, 600
# Seconds: predicted times that differ by less are the same.
_INSTANT = 1e-9


class RunFiles:
    """The files of a run. Each call of ``figures`` reads only what has been added since the last one."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of a run. Raises RecipeError for a folder without one, FileError for a damaged plan."""
        self._folder = folder
        self._documents: dict[str, tuple[object, Any]] = {}
        self._plan()
        self._parts: Mapping[str, _Metrics | _Samples | _Engines | _Events] = {
            METRICS: _Metrics(),
            "samples.jsonl": _Samples(),
            "engines.jsonl": _Engines(),
            "events.jsonl": _Events(),
        }
        self._files = {name: GrowingFile(folder / name, part.kind) for name, part in self._parts.items()}

    def figures(self) -> dict[str, Any]:
        """Return what the page shows of the run so far. Raises FileError for a file that no run has written."""
        is_running = is_locked(self._folder)
        for name, part in self._parts.items():
            is_other, lines = self._files[name].read()
            if is_other:
                part.clear()
            part.add(lines)
        fix = "move it away; the page is then that of a run that has not ended"
        plan, report = self._plan(), self._document("report.json", REPORT, fix)
        figures: dict[str, Any] = {key: value for part in self._parts.values() for key, value in part.figures().items()}
        last_step = max((steps[-1] for steps, _ in figures["curves"].values()), default=0)
        # The report of a stopped run says nothing about the steps after it has been resumed.
        report = report if report and report.steps >= last_step else None
        predicted = predicted_times(plan)
        files = self._files.values()
        left_out = [text for file in files for text in file.describe_left_out(is_growing=is_running is True)]
        return {
            **figures,
            "folder": str(self._folder),
            "name": plan.recipe.name,
            "recipe": plan.recipe.model_dump(exclude_unset=True),
            "report": None if report is None else asdict(report),
            "steps": plan.recipe.steps,
            "updated": self._updated(),
            "is_running": is_running,
            "predicted_step": {"seconds": plan.step_seconds, "nodes": predicted},
            "last_steps": [_placed(step, predicted) for step in figures["last_steps"]],
            "events": _events(figures, report),
            "left_out": left_out,
            "thumbnails": self._thumbnails(figures["samples"]),
        }

    def _plan(self) -> PlanRecord:
        plan = self._document("plan.json", PLAN, "restore it from a copy, or give the folder of another run")
        if plan is None:
            fix = "the folder that a run has printed, outputs/DATE/TIME"
            raise RecipeError("run", f"'{self._folder}' holds no run", fix=fix)
        return plan

    def _document(self, name: str, kind: TypeAdapter[T], fix: str) -> T | None:
        """Return the content of a JSON file, which is read again when it has changed; None without one."""
        path = self._folder / name
        try:
            status = path.stat()
        except OSError:
            return None
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if self._documents.get(name, (None, None))[0] != state:
            self._documents[name] = state, read_document(path, kind, fix)
        content: T = self._documents[name][1]
        return content

    def _thumbnails(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the small pictures of the last samples' images as addresses with their content, by digest."""
        digests = dict.fromkeys(image["digest"] for sample in reversed(samples) for image in sample["images"])
        thumbnails = {}
        for digest in list(digests)[:_THUMBNAILS]:
            with suppress(OSError), thumbnail_file(self._folder, digest).open("rb") as file:
                thumbnails[digest] = f"data:image/jpeg;base64,{b64encode(file.read(_THUMBNAIL_BYTES)).decode()}"
        return thumbnails

    def _updated(self) -> float | None:
        """Return when the last metrics came, in seconds since 1970."""
        try:
            return (self._folder / METRICS).stat().st_mtime
        except OSError:
            return None


class _Metrics:
    """The curves of all metrics, and the times of the last steps."""

    kind = METRICS_LINE

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._curves: dict[str, tuple[list[int], list[float]]] = {}
        self._steps: deque[Mapping[str, float]] = deque(maxlen=_STEPS)

    def add(self, lines: Sequence[Mapping[str, float]]) -> None:
        for line in lines:
            for name, value in line.items():
                if name != "step" and math.isfinite(value):
                    steps, values = self._curves.setdefault(name, ([], []))
                    steps.append(int(line["step"]))
                    values.append(value)
            if "seconds" in line:
                self._steps.append(line)

    def figures(self) -> Mapping[str, Any]:
        curves = {name: [_some(column, _POINTS) for column in columns] for name, columns in self._curves.items()}
        return {"curves": curves, "last_steps": list(self._steps)}


class _Samples:
    """The samples of some steps, more of the last ones."""

    kind = SAMPLE

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._steps: dict[int, list[SampleRecord]] = {}

    def add(self, lines: Sequence[SampleRecord]) -> None:
        for line in lines:
            shown = replace(line, prompt=_shorten(line.prompt), response=_shorten(line.response))
            self._steps.setdefault(line.step, []).append(shown)
        if len(self._steps) > 2 * _SAMPLED_STEPS:
            self._steps = {step: self._steps[step] for step in _some(list(self._steps), _SAMPLED_STEPS)}

    def figures(self) -> Mapping[str, Any]:
        steps = _some(list(self._steps), _SAMPLED_STEPS)
        return {"samples": [asdict(sample) for step in steps for sample in self._steps[step]]}


class _Engines:
    """The last step of each engine, the tokens of each role per second, and the engines that were replaced."""

    kind = ENGINE

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._engines: dict[tuple[str, int], dict[str, Any]] = {}
        self._tokens: dict[str, Counter[int]] = {}
        self._replaced: list[Event] = []

    def add(self, lines: Sequence[ActivityRecord | ReplacementRecord]) -> None:
        for line in lines:
            key = line.role, line.engine
            if isinstance(line, ReplacementRecord):
                text = f"{line.role}: engine {line.engine} replaced: {line.failed}"
                self._replaced.append({"step": line.step, "kind": "replaced", "text": text})
                continue
            before = self._engines.get(key)
            if before is None or before["step"] != line.step:
                start = {"seconds": 0.0, "tokens": 0, "cache": 0.0, "preemptions": 0}
                before = self._engines[key] = {"role": line.role, "engine": line.engine, "step": line.step, **start}
            before["seconds"] += line.seconds
            before["tokens"] += line.tokens
            before["preemptions"] += line.preemptions
            before["cache"] = max(before["cache"], line.cache)
            tokens = self._tokens.setdefault(line.role, Counter())
            tokens[int(line.at)] += line.tokens
            if len(tokens) > 2 * _SECONDS:
                self._tokens[line.role] = Counter(dict(sorted(tokens.items())[-_SECONDS:]))

    def figures(self) -> Mapping[str, Any]:
        tokens = {role: sorted(counts.items())[-_SECONDS:] for role, counts in self._tokens.items()}
        return {
            "engines": [self._engines[key] for key in sorted(self._engines)],
            "engine_tokens": {
                role: [list(column) for column in zip(*counts, strict=True)] for role, counts in tokens.items()
            },
            "replaced": list(self._replaced),
        }


class _Events:
    """The warnings of a run, and the times that it was resumed."""

    kind = EVENT

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._lines: list[Event] = []

    def add(self, lines: Sequence[EventRecord]) -> None:
        self._lines += map(asdict, lines)

    def figures(self) -> Mapping[str, Any]:
        return {"events": list(self._lines)}


def predicted_times(plan: PlanRecord) -> dict[str, tuple[float, float]]:
    """Return the predicted start and end of each node of a step in ``plan.json``; ``copy`` stands for all syncs."""
    placed: dict[str, tuple[float, float]] = {}
    for name, time in sorted(plan.nodes.items(), key=lambda item: item[1].start):
        shown = name if name in plan.recipe.graph else "copy"
        start, end = time.start, time.start + time.seconds
        first, last = placed.get(shown, (start, end))
        placed[shown] = min(first, start), max(last, end)
    return placed


def _placed(step: Mapping[str, float], predicted: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Return the measured times of a step's nodes, each after those that end before it in the plan."""
    measured = {name.removeprefix("seconds/"): value for name, value in step.items() if name.startswith("seconds/")}
    nodes: dict[str, tuple[float, float]] = {}
    for name in sorted(measured, key=lambda node: predicted.get(node, (0.0, 0.0))):
        begin = predicted.get(name, (0.0, 0.0))[0] + _INSTANT
        earlier = [end for node, (_, end) in nodes.items() if node in predicted and predicted[node][1] <= begin]
        start = max(earlier, default=0.0)
        nodes[name] = start, start + measured[name]
    return {"step": int(step["step"]), "seconds": step["seconds"], "nodes": nodes}


def _events(figures: Mapping[str, Any], report: ReportRecord | None) -> list[Event]:
    """Return warnings, resumes and replaced engines by step."""
    events = sorted([*figures["events"], *figures["replaced"]], key=lambda event: int(event["step"]))
    known = {event["text"] for event in events}
    warnings = [] if report is None else [text for text in report.warnings if text not in known]
    return [*({"step": 0, "kind": "warning", "text": text} for text in warnings), *events]


def _some(values: Sequence[Any], count: int) -> list[Any]:
    """Return at most ``count`` of the values, evenly spread, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def _shorten(text: str) -> str:
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
