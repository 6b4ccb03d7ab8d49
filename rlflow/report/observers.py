"""The observers of a run: those that show it, and those that record it."""

from rich.console import Console

from rlflow.compiler.plan import Plan
from rlflow.report.console import show_warning
from rlflow.report.engines import EngineReport
from rlflow.report.model_card import ModelCards
from rlflow.report.progress import ProgressDisplay
from rlflow.report.records import EventLog, FailureLog, MetricsWriter, SampleLog
from rlflow.report.run_page import PageWriter
from rlflow.report.trackers import trackers
from rlflow.runtime.protocols import Observer


def displays(console: Console) -> list[Observer]:
    """Return the observers that show a run: its progress, failed rewards, and engines that lag."""
    return [ProgressDisplay(console), FailureLog(console), EngineReport(console)]


def recorders(plan: Plan) -> list[Observer]:
    """Return the observers that record a run: trackers, and writers of metrics, samples, events, a page and cards.

    Trackers come first, because they read which steps the metrics of an earlier run had.
    """
    writers = [MetricsWriter(), SampleLog(), EventLog(), PageWriter(), ModelCards()]
    return [*trackers(plan.recipe.trackers, show_warning), *writers]
