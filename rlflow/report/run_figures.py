"""The figures of a run, read from the files in its folder, also while the run still writes them."""

import json
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import RecipeError
from rlflow.report.records import METRICS, parse_lines

Line = Mapping[str, Any]

# The points of a curve and the steps with samples that a page shows at most, so that it stays small for long runs.
_POINTS, _SAMPLED_STEPS = 400, 40
# The characters of a prompt or a response on the page, at most.
_CHARACTERS = 4000
# The last steps whose nodes are shown, and the seconds of engines' work.
_STEPS, _SECONDS = 5, 600
# The bytes that show that a file is the one that was read before.
_TAIL = 512
# Seconds: predicted times that differ by less are the same.
_INSTANT = 1e-9


class GrowingFile:
    """A file with a JSON object in each line, which a run extends, or replaces when it resumes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        """The end of the last complete line."""
        self._tail = b""
        """The bytes before it."""

    def read(self) -> tuple[bool, list[Line]]:
        """Return whether the file has been replaced, and its new lines. A torn last line comes later."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            was_there, self._offset, self._tail = self._offset > 0, 0, b""
            return was_there, []
        with file:
            file.seek(self._offset - len(self._tail))
            is_other = file.read(len(self._tail)) != self._tail
            if is_other:
                self._offset, self._tail = file.seek(0), b""
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._tail = (self._tail + complete)[-_TAIL:]
        return is_other, parse_lines(complete.decode("utf-8", "replace"))


class RunFiles:
    """The files of a run. Each call of ``figures`` reads only what has been added since the last one."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of a run. Raises RecipeError for a folder without one."""
        if not (folder / "plan.json").exists():
            fix = "the folder that a run has printed, outputs/DATE/TIME"
            raise RecipeError("run", f"'{folder}' holds no run", fix=fix)
        self._folder = folder
        self._parts: Mapping[str, _Metrics | _Samples | _Engines | _Events] = {
            METRICS: _Metrics(),
            "samples.jsonl": _Samples(),
            "engines.jsonl": _Engines(),
            "events.jsonl": _Events(),
        }
        self._files = {name: GrowingFile(folder / name) for name in self._parts}
        self._documents: dict[str, tuple[object, Any]] = {}

    def figures(self) -> dict[str, Any]:
        """Return what the page shows of the run so far."""
        for name, part in self._parts.items():
            is_other, lines = self._files[name].read()
            if is_other:
                part.clear()
            part.add(lines)
        plan, report = self._document("plan.json") or {}, self._document("report.json")
        figures: dict[str, Any] = {key: value for part in self._parts.values() for key, value in part.figures().items()}
        last_step = max((steps[-1] for steps, _ in figures["curves"].values()), default=0)
        # The report of a stopped run says nothing about the steps after it has been resumed.
        report = report if report and report.get("steps", last_step) >= last_step else None
        predicted = predicted_times(plan)
        return {
            **figures,
            "folder": str(self._folder),
            "name": plan["recipe"]["name"],
            "recipe": plan["recipe"],
            "report": report,
            "steps": plan["recipe"]["steps"],
            "updated": self._updated(),
            "predicted_step": {"seconds": plan.get("step_seconds"), "nodes": predicted},
            "last_steps": [_placed(step, predicted) for step in figures["last_steps"]],
            "events": _events(figures, report),
        }

    def _document(self, name: str) -> Any:
        """Return the content of a JSON file, which is read again when it has changed; None without one."""
        path = self._folder / name
        try:
            status = path.stat()
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if self._documents.get(name, (None, None))[0] != state:
                # JSON in a browser has no NaN.
                content = json.loads(path.read_text("utf-8"), parse_constant=lambda _: None)
                self._documents[name] = state, content
        except (FileNotFoundError, ValueError):
            return None
        return self._documents[name][1]

    def _updated(self) -> float | None:
        """Return when the last metrics came, in seconds since 1970."""
        try:
            return (self._folder / METRICS).stat().st_mtime
        except FileNotFoundError:
            return None


class _Metrics:
    """The curves of all metrics, and the times of the last steps."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._curves: dict[str, tuple[list[int], list[float]]] = {}
        self._steps: deque[Line] = deque(maxlen=_STEPS)

    def add(self, lines: Sequence[Line]) -> None:
        for line in lines:
            for name, value in line.items():
                if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                    steps, values = self._curves.setdefault(name, ([], []))
                    steps.append(line["step"])
                    values.append(value)
            if "seconds" in line:
                self._steps.append(line)

    def figures(self) -> Mapping[str, Any]:
        curves = {name: [_some(column, _POINTS) for column in columns] for name, columns in self._curves.items()}
        return {"curves": curves, "last_steps": list(self._steps)}


class _Samples:
    """The samples of some steps, more of the last ones."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._steps: dict[int, list[Line]] = {}

    def add(self, lines: Sequence[Line]) -> None:
        for line in lines:
            shown = {**line, "prompt": _shorten(line["prompt"]), "response": _shorten(line["response"])}
            self._steps.setdefault(line["step"], []).append(shown)
        if len(self._steps) > 2 * _SAMPLED_STEPS:
            self._steps = {step: self._steps[step] for step in _some(list(self._steps), _SAMPLED_STEPS)}

    def figures(self) -> Mapping[str, Any]:
        steps = _some(list(self._steps), _SAMPLED_STEPS)
        return {"samples": [sample for step in steps for sample in self._steps[step]]}


class _Engines:
    """The last step of each engine, the tokens of each role per second, and the engines that were replaced."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._engines: dict[tuple[str, int], dict[str, Any]] = {}
        self._tokens: dict[str, Counter[int]] = {}
        self._replaced: list[Line] = []

    def add(self, lines: Sequence[Line]) -> None:
        for line in lines:
            key = line["role"], line["engine"]
            if "failed" in line:
                text = f"{key[0]}: engine {key[1]} replaced: {line['failed']}"
                self._replaced.append({"step": line["step"], "kind": "replaced", "text": text})
                continue
            before = self._engines.get(key)
            if before is None or before["step"] != line["step"]:
                start = {"seconds": 0.0, "tokens": 0, "cache": 0.0, "preemptions": 0}
                before = self._engines[key] = {"role": key[0], "engine": key[1], "step": line["step"], **start}
            for name in ("seconds", "tokens", "preemptions"):
                before[name] += line[name]
            before["cache"] = max(before["cache"], line["cache"])
            tokens = self._tokens.setdefault(key[0], Counter())
            tokens[int(line["at"])] += line["tokens"]
            if len(tokens) > 2 * _SECONDS:
                self._tokens[key[0]] = Counter(dict(sorted(tokens.items())[-_SECONDS:]))

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

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._lines: list[Line] = []

    def add(self, lines: Sequence[Line]) -> None:
        self._lines += lines

    def figures(self) -> Mapping[str, Any]:
        return {"events": list(self._lines)}


def predicted_times(plan: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the predicted start and end of each node of a step in ``plan.json``; ``copy`` stands for all syncs."""
    graph, times = plan["recipe"].get("graph", {}), plan.get("nodes", {})
    placed: dict[str, tuple[float, float]] = {}
    for name, time in sorted(times.items(), key=lambda item: float(item[1]["start"])):
        shown = name if name in graph else "copy"
        start, end = time["start"], time["start"] + time["seconds"]
        first, last = placed.get(shown, (start, end))
        placed[shown] = min(first, start), max(last, end)
    return placed


def _placed(step: Line, predicted: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Return the measured times of a step's nodes, each after those that end before it in the plan."""
    measured = {name.removeprefix("seconds/"): value for name, value in step.items() if name.startswith("seconds/")}
    nodes: dict[str, tuple[float, float]] = {}
    for name in sorted(measured, key=lambda each: predicted.get(each, (0.0, 0.0))):
        begin = predicted.get(name, (0.0, 0.0))[0] + _INSTANT
        earlier = [end for each, (_, end) in nodes.items() if each in predicted and predicted[each][1] <= begin]
        start = max(earlier, default=0.0)
        nodes[name] = start, start + measured[name]
    return {"step": step["step"], "seconds": step["seconds"], "nodes": nodes}


def _events(figures: Mapping[str, Any], report: Mapping[str, Any] | None) -> list[Line]:
    """Return warnings, resumes and replaced engines by step."""
    events = sorted([*figures["events"], *figures["replaced"]], key=lambda event: int(event["step"]))
    known = {event["text"] for event in events}
    warnings = [] if report is None else [text for text in report["warnings"] if text not in known]
    return [*({"step": 0, "kind": "warning", "text": text} for text in warnings), *events]


def _some(values: Sequence[Any], count: int) -> list[Any]:
    """Return at most ``count`` of the values, evenly spread, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def _shorten(text: str) -> str:
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
