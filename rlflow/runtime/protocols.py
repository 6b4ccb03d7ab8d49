"""The protocols of a run: where its engines live, who observes it, and what it returns."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rlflow.batch import Rollouts
from rlflow.batch.sample import Sample
from rlflow.compiler.plan import Plan
from rlflow.engines.memory import PhasePeaks
from rlflow.engines.times import UNTRACED, Span, Times, record_each
from rlflow.recipe import Model
from rlflow.resources.memory.processes import LOCAL_PROCESS

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StoreUse:
    """The bytes in the object stores of the hosts."""

    edges: Mapping[str, float]
    """The mean of a step, by the node or the data source whose output it is."""
    peaks: Mapping[str, int]
    """The largest number of bytes at once, by host."""


@dataclass(frozen=True)
class Lost:
    """The processes and hosts that a run has lost."""

    processes: Sequence[str] = ()
    """The processes that have died or were ended, as messages name them."""
    hosts: Sequence[str] = ()
    """The plan's names of the hosts."""
    hosts_may_return: bool = False
    """The hosts are those of a Ray that was not started by the run, which may get them back."""

    def __bool__(self) -> bool:
        return bool(self.processes or self.hosts)


class Workers(Protocol):
    """The workers of a role, by rank."""

    def __len__(self) -> int: ...

    def submit(self, rank: int, method: str, *arguments: Any, wanted: bool = True) -> "Future[Any]":
        """Call a method of the worker's engine. A BatchSlice arrives as a batch of its rows.

        The future of a result that is not ``wanted`` is None. It raises EngineError or a UserError.
        """

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace the engines of these ranks by new ones; the others keep running. Raises EngineError."""

    def dead_ranks(self) -> list[int]:
        """Return the ranks whose processes have died or were ended."""

    def sync_weights(self, source: "Workers", version: int) -> None:
        """Copy the weights of ``source`` to all workers. Raises EngineError when one has not loaded all of them."""


class Subscriber(Protocol):
    """A consumer of finished samples, while their generation goes on."""

    def receive(self, rank: int, part: Rollouts) -> None:
        """Receive samples that an engine has finished. Each sample comes once."""

    def discard_engine(self, rank: int) -> None:
        """Discard all samples of an engine that has failed. Other engines will generate them again."""


class Engines(dict[str, Any]):
    """The engine of each role, and what the runtime offers besides. Here all engines are in this process."""

    peaks: PhasePeaks | None = None
    """The peak memory of this process, where it is recorded."""
    trace: Times = UNTRACED
    """The times at which nodes ran, in a traced run."""

    def step_metrics(self, step: int) -> dict[str, float]:
        """Return the metrics that the engines measured in this step, counted from 1."""
        return self.peaks.take_metrics() if self.peaks else {}

    def record_calls(self) -> Callable[[], dict[str, list[Span]]]:
        """Record the calls of all engines; return a function that takes those since the last time, by worker."""
        return record_each({f"{role}/0": engine for role, engine in self.items()})

    def take_warnings(self) -> list[str]:
        """Return the warnings about engines since the last call, such as one that is much slower than the others."""
        return []

    def store_use(self) -> StoreUse:
        """Return the use of object stores in all measured steps so far; empty in a single process."""
        return StoreUse(edges={}, peaks={})

    def peak_bytes(self) -> dict[str, dict[str, int]]:
        """Return the peak memory of each process in each phase so far."""
        return {LOCAL_PROCESS: dict(self.peaks.bytes)} if self.peaks else {}

    def stream_to(self, subscriber: Subscriber, role: str) -> AbstractContextManager[None]:
        """Stream the role's finished responses to the subscriber within the context, from engines that can."""
        return nullcontext()

    def on_lost_weights(self, role: str, resync: Callable[[], None]) -> None:
        """Have ``resync`` sync weights to the role when all its engines have failed within a generation.

        By default the trained role sends what it has now, which it cannot while it trains.
        """

    def are_apart(self, role: str, other: str | None) -> bool:
        """Return whether two roles can work at the same time, on different GPUs.

        None stands for nodes without a role: an engine in this process would compete with them for its cores.
        """
        return False

    def find_lost(self) -> Lost:
        """Return what has been lost since the engines started. Takes a few seconds at most."""
        return Lost()

    def restart_lost(self) -> None:
        """Start the engines of trained roles anew, and of all roles that have lost any; the others keep running.

        They are as after the start of the run. Every other process ends, and starts again when it is needed.
        """

    def mark_idle(self, role: str) -> None:
        """Note that the role is idle until the next weight sync, so that it need not keep its own."""

    def place_with_tokens(self, instance: T) -> T:
        """Return an object with the methods of ``instance``, which lives where tokens are.

        On Ray that is a process of its own on this host, so that what it gets and returns does not pass through this
        process. Only the methods may be used.
        """
        return instance

    def place_with_samples(self, node: T) -> T:
        """Return a node that processes samples or groups apart as it runs on every host, on the samples there.

        On Ray it has a process of its own on each of these hosts. Only ``run`` may be used.
        """
        return node


class Runtime(Protocol):
    """A place where engines live: this process, or Ray."""

    def check(self, plan: Plan) -> None:
        """Raise a UserError for a plan that cannot run here. Start nothing."""

    def start(self, plan: Plan, models: Mapping[str, Model], directory: Path) -> AbstractContextManager[Engines]:
        """Start an engine for each role, with the capabilities that the graph asks of it; stop all on exit.

        A role that follows another works only after its first weight sync. ``models`` are the recipe's, each with a
        path or random weights; ``directory`` is the run's folder. Raises PlacementError for a cluster that is not as
        planned, EngineError for an engine that does not start.
        """


class Observer:
    """A subscriber to the events of a run, in the run's own process. Derive from it and override what matters."""

    def warned(self, warning: str) -> None:
        """Receive a warning of a run that continues. May come before ``started``."""

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        """Receive the number of steps made so far: 0, or those of the checkpoint that the run resumes from.

        Comes again, after ``close``, when a run that has lost workers goes back to its last checkpoint.
        """

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive all metrics of an evaluation after ``step`` steps. Comes before ``evaluated``."""

    def evaluated(self, step: int, figure: float) -> None:
        """Receive the first metric of an evaluation: the mean reward of held-out prompts, or the accuracy on pairs."""

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of step number ``step``, counted from 1."""

    def failed(self, step: int, node: str, reasons: Mapping[str, int]) -> None:
        """Receive why a node could not judge some samples of a step, and how many. Comes before ``stepped``."""

    def sampled(self, samples: Sequence[Sample]) -> None:
        """Receive a few samples of a step, for people to read. Comes before ``stepped``, in steps that generate."""

    def ended(self, report: "Report") -> None:
        """Receive the report of a run that made all its steps or was asked to stop."""

    def close(self) -> None:
        """Release what the observer holds: the last call of a run that has started, also of one that failed.

        ``started`` may follow.
        """


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a run, also in ``report.json``."""

    name: str
    """The name of the recipe."""
    fingerprint: str
    """The fingerprint of the plan, which identifies the experiment."""
    status: Literal["finished", "stopped"]
    """A stopped run can be resumed."""
    directory: str
    """The run's folder."""
    steps: int
    """The steps made in all, including those before a resume."""
    seconds: float
    """The time of training and evaluation in this process."""
    eval_before: float | None
    """The measure on held-out rows before training; None without evaluations."""
    eval_after: float | None
    """The same after the last step."""
    restarts: int = 0
    """The number of returns to a checkpoint in this process, after workers or hosts were lost."""
    step: Mapping[str, float | None] = field(default_factory=dict)
    """The seconds of a step, ``predicted`` and ``measured``: the median without the first step."""
    nodes: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """The seconds of each node in a step, ``predicted`` and ``measured``; ``copy`` stands for all weight copies."""
    memory: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)
    """GiB at the peak of each phase of each process, ``predicted`` and ``measured``."""
    store: Mapping[str, Mapping[str, float]]
    """MiB of each edge, and the peak of each host: ``predicted`` and ``measured``. Empty for a run in one process."""
    overlap: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Generation ahead of training: the share of tokens by their age in versions; and their mean age and the idle share
    of both sides, ``predicted`` and ``measured``. Empty for synchronous steps."""
    warnings: Sequence[str]
    """Warnings about the run: prompts that were too long, checkpoints that were damaged."""
    models: Mapping[str, str]
    """The folder of each trained role's model, when finished."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last step, as in ``metrics.jsonl``; empty where the run made no step."""

    def history(self) -> list[dict[str, float]]:
        """Return the metrics of every step and evaluation, from ``metrics.jsonl``."""
        return _read_lines(Path(self.directory) / "metrics.jsonl")

    def samples(self) -> list[dict[str, Any]]:
        """Return a few samples of every step, from ``samples.jsonl``: the best, the worst and a random one.

        Empty where the run generates nothing.
        """
        path = Path(self.directory) / "samples.jsonl"
        return _read_lines(path) if path.exists() else []


def _read_lines(path: Path) -> list[dict[str, Any]]:
    # Texts of samples may hold other characters that end a line.
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
