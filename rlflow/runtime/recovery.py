"""The recovery of a run from lost workers and hosts: it goes back to its last checkpoint with new ones.

Everything that a resumed run reads again is read again here too, so that both end in the same weights. Only what costs
most stays: the data set, and the engines that have lost nothing.
"""

import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rlflow.compiler import compile_recipe
from rlflow.compiler.plan import Plan, format_duration, write_plan
from rlflow.data.source import DataSource
from rlflow.errors import EngineError, PlacementError
from rlflow.recipe import Model, Tune
from rlflow.runtime.checkpoint import Checkpoint, RunProgress, checkpoints, remove_unfinished
from rlflow.runtime.observers import Observers
from rlflow.runtime.preflight import last_checkpoint
from rlflow.runtime.protocols import Engines, Lost, Observer, Runtime
from rlflow.runtime.trace import TraceWriter
from rlflow.runtime.tuning import with_spare_slots
from rlflow.runtime.utilization import UpdateWork

# Seconds that a run waits for a lost host, as long as a cluster needs to replace one, and seconds between two looks.
_HOST_WAIT_S = 600.0
_POLL_S = 5.0


@dataclass(kw_only=True)
class Session:
    """A run with its engines, which may be started more than once."""

    plan: Plan
    directory: Path
    runtime: Runtime
    models: Mapping[str, Model]
    observers: Sequence[Observer]
    stop: Callable[[], bool]
    tune: Tune
    trace: TraceWriter | None = None
    profile: Collection[int] = ()
    """The steps in which engines are profiled."""
    last: Checkpoint | None
    """The checkpoint to continue from; None for the initial weights."""
    progress: RunProgress
    """The steps made so far: none, or those of the checkpoint."""
    warnings: list[str]
    started_at: float = field(default_factory=time.perf_counter)
    restarts: int = 0
    """How often the run has gone back to a checkpoint."""
    engines: Engines = field(default_factory=Engines)
    data: DataSource
    """The data, in the process where the engines read it."""

    def __post_init__(self) -> None:
        self._running = ExitStack()
        self._own_data = self.data
        self._num_returns = 0
        """How often in a row the run has gone back to the same checkpoint."""

    def __enter__(self) -> Self:
        """Start the engines. Raises the errors of ``Runtime.start``."""
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Stop the engines."""
        return self._running.__exit__(kind, error, traceback)

    def recover(self, error: EngineError) -> None:
        """Replace what was lost, so that the run can continue from its last checkpoint.

        Raises ``error`` if nothing was lost or nothing can replace it, for a run that has been asked to stop, and for
        one that comes back to the same checkpoint too often.
        """
        recipe, lost = self.plan.recipe, self.engines.find_lost()
        is_replaceable = not lost.hosts or recipe.elastic or lost.hosts_may_return
        if not lost or not is_replaceable or not recipe.max_restarts or self.stop():
            raise error
        _release_values(error)
        before = self.progress.step
        remove_unfinished(self.directory)
        self.last, self.progress = last_checkpoint(self.plan, self.directory, resume=bool(checkpoints(self.directory)))
        self._own_data = replace(self._own_data, resumed_at=(self.progress.step, self.progress.rows))
        self._num_returns = self._num_returns + 1 if self.restarts and self.progress.step == before else 1
        if self._num_returns > recipe.max_restarts:
            allowed = f"max_restarts={recipe.max_restarts} allows"
            error.add_note(f"the run has gone back to step {self.progress.step} as often as {allowed}")
            raise error
        self.restarts += 1
        self._warn(*self.last.damaged if self.last else ())
        self._replace(lost, error)
        # Ranks that were alive until now may have written on into their part of a checkpoint.
        remove_unfinished(self.directory)

    def _replace(self, lost: Lost, error: EngineError) -> None:
        """Start new workers: on the same hosts, on those that are left, or once lost hosts are back."""
        if not lost.hosts:
            self._note(error, lost, "New workers start")
            self.engines.restart_lost()
            self.data = self.engines.place_with_tokens(self._own_data)
        elif self.plan.recipe.elastic:
            smaller = _planned_without(self.plan, lost.hosts, error)
            self.runtime.check(smaller)
            changes = _changes(self.plan, smaller)
            self._note(error, lost, f"The run is planned again for {smaller.cluster.shape} ({changes})")
            self._running.close()
            self.plan = smaller
            self._start()
        else:
            minutes = f"{_HOST_WAIT_S / 60:g} minutes"
            self._note(error, lost, f"The run waits {minutes} for its return (elastic=true continues without it)")
            self._running.close()
            self._start_with_all_hosts(error)

    def _start(self) -> None:
        write_plan(self.plan, self.directory)
        plan = with_spare_slots(self.plan) if self.tune else self.plan
        self.engines = self._running.enter_context(self.runtime.start(plan, self.models, self.directory))
        self.data = self.engines.place_with_tokens(self._own_data)
        self.work = UpdateWork(self.plan, self.engines)

    def _start_with_all_hosts(self, error: EngineError) -> None:
        """Start the engines once all hosts of the plan are there. Raises ``error`` when they do not come back."""
        deadline = time.monotonic() + _HOST_WAIT_S
        while True:
            try:
                return self._start()
            except PlacementError:
                if self.stop() or time.monotonic() >= deadline:
                    raise error from None
            time.sleep(_POLL_S)

    def _note(self, error: EngineError, lost: Lost, action: str) -> None:
        """Tell the observers what was lost, what is done about it, and from which step the run continues."""
        names = [f"host '{host}'" for host in lost.hosts] or [name for name in lost.processes if name not in str(error)]
        facts = [f"Lost: {', '.join(names)}."] if names else []
        self._warn(" ".join([str(error), *facts, f"{action}, and the run continues from step {self.progress.step}."]))

    def _warn(self, *warnings: str) -> None:
        for warning in warnings:
            Observers(self.observers).warned(warning)
        self.warnings += warnings


def _release_values(error: BaseException) -> None:
    """Release the batches of the failed step, which the frames of the error hold: others may wait for their room."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def _planned_without(plan: Plan, lost: Collection[str], error: EngineError) -> Plan:
    """Return a plan for the hosts that are left. Raises EngineError where none fits."""
    hosts = [host for host in plan.cluster.hosts if host.name not in lost]
    if all(host.name == f"host-{index}" for index, host in enumerate(plan.cluster.hosts)):
        # These names stand for any host, as long as their numbers have no gap.
        hosts = [replace(host, name=f"host-{index}") for index, host in enumerate(hosts)]
    try:
        if not hosts:
            raise PlacementError("cluster", "no host is left")
        return compile_recipe(plan.recipe, replace(plan.cluster, hosts=tuple(hosts)), plan.calibration)
    except PlacementError as misfit:
        raise EngineError(f"{error}\n  No plan fits the hosts that are left. {misfit}") from error


def _changes(before: Plan, after: Plan) -> str:
    """Describe the difference of two plans in a few words."""
    gpus = {role: (len(before.roles[role].bundles), len(after.roles[role].bundles)) for role in after.roles}
    roles = [f"{role} on {new} GPUs, was on {old}" for role, (old, new) in gpus.items() if new != old]
    seconds = [format_duration(plan.prediction.step_seconds) for plan in (after, before)]
    return "; ".join([*roles, f"{seconds[0]} per step, was {seconds[1]}"])
