"""The progress of a run: a bar with figures on a terminal, plain lines in files and pipes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from rlflow.compiler.plan import Plan
from rlflow.nodes.base import Headline
from rlflow.recipe.evaluation import PREFIX
from rlflow.report.formats import format_seconds
from rlflow.report.records import METRICS, read_lines
from rlflow.report.run_page import PAGE
from rlflow.runtime.protocols import Observer, Report

# The number of plain lines in a whole run, besides those of evaluations.
_MAX_LINES = 20
# The characters of a sparkline, from low to high, and the most that it has.
_LEVELS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 20


class _LiveMetrics(Progress):
    """A progress bar with the metrics of the last step below it."""

    lines: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from (Text(line, no_wrap=True, overflow="ellipsis") for line in self.lines)


class ProgressDisplay(Observer):
    """A display of step, reward, KL, response length, tokens per second and remaining time.

    A terminal also shows the reward over the run, and what the engines and the GPUs do.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: _LiveMetrics | None = None

    def warned(self, warning: str) -> None:
        self._console.print(f"warning: {warning}", soft_wrap=not self._console.is_terminal, markup=False)

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._plan, self._directory = plan, directory
        self._steps = plan.recipe.steps
        self._columns = [(label, metric, headline.format) for label, metric, headline in _headlines(plan)]
        self._columns.append(("tokens/s", "tokens_per_second", ".0f"))
        options, split = plan.recipe.evaluation, plan.recipe.data.eval_split
        figure = options.figure(split, plan.graph.evaluation_metric) if options else ""
        self._figure = f"held-out {figure.removeprefix(PREFIX)}"
        self._seconds: list[float] = []
        since = f", from step {step}" if step else ""
        self._console.print(f"[bold]{plan.recipe.name}[/]: {self._steps} steps{since}, in {directory}", soft_wrap=True)
        if self._console.is_terminal:
            self._curve_label, self._curve_metric = _curve_of(plan)
            # The curve of a continued run begins where the run began.
            path = directory / METRICS
            earlier = read_lines(path) if step and path.exists() else []
            self._curve = [line[self._curve_metric] for line in earlier if self._curve_metric in line]
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = _LiveMetrics(*columns, console=self._console)
            self._task = self._bar.add_task("step", total=self._steps, completed=step)
            self._bar.start()

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        sets: dict[str, list[str]] = {}
        for name, value in metrics.items():
            evaluation_set, _, metric = name.removeprefix(PREFIX).rpartition("/")
            sets.setdefault(evaluation_set, []).append(f"{metric} {value:.3f}")
        for evaluation_set, shown in sets.items():
            self._console.print(f"step {step:>5}  held-out {evaluation_set and f'{evaluation_set} '}{'  '.join(shown)}")

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._seconds = [*self._seconds[-19:], metrics["seconds"]]
        shown = [f"{label} {metrics[name]:{form}}" for label, name, form in self._columns if name in metrics]
        if self._bar is not None:
            self._bar.lines = ["  ".join(shown), "  ".join(self._live_figures(metrics))]
            self._bar.update(self._task, completed=step)
        elif step % max(1, self._steps // _MAX_LINES) == 0:
            left = (self._steps - step) * sum(self._seconds) / len(self._seconds)
            self._console.print(f"step {step:>5}  {'  '.join(shown)}  {left:.0f} s left", soft_wrap=True)

    def ended(self, report: Report) -> None:
        self.close()
        if report.eval_before is not None and report.eval_after is not None:
            before, after = f"eval_before {report.eval_before:.3f}", f"eval_after {report.eval_after:.3f}"
            self._console.print(f"{self._figure}: {before}, {after}")
        verb = "finished" if report.steps == self._steps else f"{report.status} after step {report.steps}"
        self._console.print(f"{report.name} {verb}: {report.seconds:.0f} s")
        if report.status == "finished" and report.steps < self._steps:
            self._console.print("  the last evaluations brought no new best (evaluation.patience)")
        for role, folder in report.models.items():
            self._console.print(f"  model of {role}: {folder}", soft_wrap=True)
        if (page := self._directory / PAGE).exists():
            self._console.print(f"  report: {page}", soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _live_figures(self, metrics: Mapping[str, float]) -> list[str]:
        """Return what else is known of a step: a curve, engines, memory, staleness, and the time beside the plan's."""
        self._curve += [metrics[self._curve_metric]] if self._curve_metric in metrics else []
        curve = "" if self._console.options.ascii_only else sparkline(self._curve)
        speeds = {name.partition("/")[0]: value for name, value in metrics.items() if name.endswith(_ENGINE_SPEED)}
        # The first of several steps that are generated together takes the time of all.
        measured = format_seconds(fmean(self._seconds[-self._plan.steps_per_turn :]))
        predicted = format_seconds(self._plan.prediction.step_seconds)
        shown = [f"{self._curve_label} {curve:<{_SPARKLINE_WIDTH}}"] if curve else []
        shown.append(f"step {measured} (predicted {predicted})")
        shown += [f"{role} {speed:.0f} tokens/s per engine" for role, speed in speeds.items()]
        shown += [f"{label} {metrics[name]:{form}}" for label, name, form in _LIVE_COLUMNS if name in metrics]
        return shown


def sparkline(values: Sequence[float]) -> str:
    """Return a curve as characters of different height, each for the mean of an equal part of the values.

    The lowest mean has the lowest character and the highest mean the highest. Values that are not finite are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    width = min(len(finite), _SPARKLINE_WIDTH)
    cuts = [round(part * len(finite) / width) for part in range(width + 1)] if width else []
    means = [fmean(finite[start:end]) for start, end in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(top * (mean - low) / (high - low)) if high > low else 0] for mean in means)


_ENGINE_SPEED = "/engines/tokens_per_second"
_LIVE_COLUMNS = [("memory", "memory/fullest", ".0%"), ("staleness", "overlap/staleness_mean", ".1f")]


def _headlines(plan: Plan) -> Iterator[tuple[str, str, Headline]]:
    """Yield the headlines of the graph's nodes, each after its label and the name of its metric."""
    for node in plan.graph.nodes:
        if (headline := node.operation.headline) is not None:
            label = headline.label or ("reward" if node.name == "rewards" else node.name)
            yield label, f"{node.name}/{headline.metric}", headline


def _curve_of(plan: Plan) -> tuple[str, str]:
    """Return label and metric of the headline that is drawn over the run: the first reward, accuracy or loss."""
    learned = ((label, metric) for label, metric, headline in _headlines(plan) if headline.is_learned)
    return next(learned, ("", ""))
