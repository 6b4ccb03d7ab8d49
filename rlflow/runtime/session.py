"""A run with its engines, which may be started more than once."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.compiler.plan import Plan, write_plan
from rlflow.data.source import DataSource
from rlflow.recipe import Model
from rlflow.recipe.options import RunOptions
from rlflow.runtime.checkpoint import Checkpoint, RunProgress
from rlflow.runtime.observers import Observers
from rlflow.runtime.protocols import Engines, Runtime
from rlflow.runtime.trace import TraceWriter
from rlflow.runtime.tuning import with_spare_slots
from rlflow.runtime.utilization import UpdateWork


@dataclass(kw_only=True)
class Session:
    """A run with its engines."""

    plan: Plan
    directory: Path
    runtime: Runtime
    observer: Observers
    options: RunOptions
    stop: Callable[[], bool]
    """Called after every step; once it returns True, the run ends with a checkpoint."""
    models: Mapping[str, Model]
    local_data: DataSource
    """The data in this process."""
    last: Checkpoint | None
    """The checkpoint to continue from; None for the initial weights."""
    progress: RunProgress
    """The steps made so far: none, or those of the checkpoint."""
    warnings: list[str]
    restarts: int = 0
    """How often the run has gone back to a checkpoint."""
    returns: int = 0
    """How often in a row it has gone back to the same one."""
    trace: TraceWriter | None = None
    started_at: float = field(default_factory=time.perf_counter)
    engines: Engines = field(init=False)
    data: DataSource = field(init=False)
    """The data, in the process where the engines read it."""
    work: UpdateWork = field(init=False)
    running: ExitStack = field(default_factory=ExitStack)
    """Stops the engines."""

    def start(self) -> None:
        """Start the engines. Raises the errors of ``Runtime.start``."""
        write_plan(self.plan, self.directory)
        plan = with_spare_slots(self.plan) if self.options.tune else self.plan
        self.engines = self.running.enter_context(self.runtime.start(plan, self.models, self.directory))
        self.data = self.engines.place_with_tokens(self.local_data)
        self.work = UpdateWork(self.plan, self.engines)

    def warn(self, *warnings: str) -> None:
        """Tell the observers, and the report at the end."""
        for warning in warnings:
            self.observer.warned(warning)
        self.warnings += warnings
