"""The seam to where workers live, to those who watch a run, and what a run ends in.

The report of a run, with the measurements beside the predictions.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rlflow.compiler.plan import Plan
from rlflow.recipe import Model
from rlflow.resources.layout import GIB
from rlflow.runtime.generation.partial_results import Listener

Held = TypeVar("Held")


@dataclass(frozen=True, kw_only=True)
class StoreUse:
    """What lay in the object stores of the hosts, in bytes."""

    edges: Mapping[str, float]
    """Of a step in the mean, by the node or the source that gave it."""
    peaks: Mapping[str, int]
    """The most at a time, by host."""


class Engines(dict[str, Any]):
    """The engine of each role."""

    def measured(self, step: int) -> dict[str, float]:
        """What the engines measured of themselves in this step, counted from 1, in single numbers."""
        return {}

    def store_use(self) -> StoreUse:
        """In all steps so far that were measured; nothing where there is one process."""
        return StoreUse(edges={}, peaks={})

    def heard_by(self, listener: Listener, role: str) -> AbstractContextManager[None]:
        """Inside, whoever listens is told what the role's engines write, where they can say it before they are done
        with all."""
        return nullcontext()

    def done_until_copied(self, role: str) -> None:
        """Note that the role works no more before the next copy of weights, so that it need not keep its own."""

    def hosted(self, held: Held) -> Held:
        """``held``, which is used by its methods alone: where engines are elsewhere, it may live in a process of its
        own from now on, and then what it gives and gets does not pass through this one."""
        return held


class Runtime(Protocol):
    def check(self, plan: Plan) -> None:
        """Raises a UserError for a plan that cannot be run here. Starts nothing."""

    def start(self, plan: Plan, models: Mapping[str, Model], directory: Path) -> AbstractContextManager[Engines]:
        """An engine for each role, with the capabilities that the graph asks of it; all are stopped on exit.

        A role that follows another works only after weights were copied to it.
        ``models`` are the recipe's, each with a path or random weights; ``directory`` is the run's folder. Raises
        PlacementError for a cluster that is not as planned, EngineError for an engine that does not start.
        """


class Observer:
    """Is told what happens in a run, in the run's own process. Whoever derives from it says what matters to them."""

    def warned(self, warning: str) -> None:
        """The run goes on, but a person should know this. May come before ``started``."""

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        """``step`` steps are behind it: 0, or those of the checkpoint that it goes on from."""

    def evaluated(self, step: int, figure: float) -> None:
        """The mean reward of held-out prompts under greedy decoding, or the accuracy on held-out pairs, after ``step``
        steps."""

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """After step number ``step``, counted from 1."""

    def failed(self, step: int, node: str, reasons: Mapping[str, int]) -> None:
        """In this step a node could not judge some samples: why, and how many. Comes before ``stepped``."""

    def ended(self, report: "Report") -> None:
        """The run is over, by itself or because it was asked to stop."""

    def close(self) -> None:
        """The last call of a run that has started, also of one that failed."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run ended in; ``report.json``."""

    name: str
    fingerprint: str
    status: Literal["finished", "stopped"]
    directory: str
    steps: int
    """Behind the run, those before a resume included."""
    seconds: float
    """Of this process's training, evaluations included."""
    eval_before: float | None
    eval_after: float | None
    store: Mapping[str, Mapping[str, float]]
    """MiB of each edge and, at a time, of each host: ``predicted`` and ``measured``. Empty for a run in one process."""
    warnings: Sequence[str]
    """Warnings about the run: prompts that were too long, checkpoints that were damaged."""
    models: Mapping[str, str]
    """The folder of each trained role's model, when finished."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last step, as in ``metrics.jsonl``; empty where the run made no step."""

    def history(self) -> list[dict[str, float]]:
        """Return the metrics of every step and evaluation, from ``metrics.jsonl``."""
        lines = (Path(self.directory) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def report_of(
    plan: Plan,
    directory: Path,
    step: int,
    seconds: float,
    evaluations: Mapping[str, float],
    stored: Mapping[str, Mapping[str, float]],
    warnings: Sequence[str],
    models: Mapping[str, str],
    metrics: Mapping[str, float],
) -> Report:
    """Return what a run ended in."""
    scores, finished = list(evaluations.values()), step == plan.recipe.steps
    return Report(
        name=plan.recipe.name,
        fingerprint=plan.fingerprint,
        status="finished" if finished else "stopped",
        directory=str(directory),
        steps=step,
        seconds=seconds,
        eval_before=scores[0] if scores else None,
        eval_after=scores[-1] if scores and finished else None,
        store=stored,
        warnings=warnings,
        models=models,
        metrics=metrics,
    )


def compared(plan: Plan, use: StoreUse) -> dict[str, dict[str, float]]:
    """Return the MiB of everything in the stores that was both predicted and measured."""
    predicted = plan.prediction.data
    pairs = {name: (size, use.edges[name]) for name, size in predicted.edges.items() if name in use.edges}
    pairs |= {
        f"peak of {host}": (gib * GIB, use.peaks[host])
        for host, gib in predicted.store_peak_gib.items()
        if host in use.peaks
    }
    return {name: {"predicted": a / 2**20, "measured": b / 2**20} for name, (a, b) in pairs.items()}
