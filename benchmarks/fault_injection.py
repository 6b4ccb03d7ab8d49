"""Faults that happen once, in whichever process of a run comes to a stage first: kinds, stages and what they do.

The faults of a run are files in a folder, ``fault-N.json``. They happen in their order: a process that enters a stage
looks at the first file, and renames it to ``happened-N.json`` if it is meant. So each fault happens once, whatever is
restarted or resumed later.
"""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.batch import Batch, Logprobs, Packed, Rewards, RolloutAdvantages, Rollouts
from rlflow.nodes.advantages import GroupAdvantage
from rlflow.nodes.base import Node
from rlflow.runtime.objects.object_process import ObjectProcess
from rlflow.runtime.ray.worker import EngineWorker
from rlflow.system.processes import descendants

# The methods of engines and objects that make up a stage, by role; those that return samples or values come last.
_CALLS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "generate": {"rollout": ("advance",)},
    "decode": {"rollout": ("step",)},
    "score": {"rewards": ("run",)},
    "reference": {"reference": ("logprobs",)},
    "advantage": {"driver": ("run",)},
    "update": {"actor": ("update",)},
    "sync": {"rollout": ("load_weights",), "actor": ("next_bucket",)},
    "save": {"actor": ("save",), "driver": ("stepped",)},
}
_RESULTS = {"rollout": ("finish_session", "take_rollouts")}
_LOST_HOST = "--node-name=host-1"
# A slow call is delayed by this many times its own duration, and by at least so many seconds.
_SLOWER, _SLOW_S = 20.0, 0.5
_DELAY_S = 2.0
# The largest size of a file on a full disk, and the bytes that a process may still take when it is out of memory.
_FILE_SIZE, _FREE_MEMORY = 1 << 11, 1 << 26


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a run. ``role`` is the one whose process comes to the stage."""

    number: int
    kind: str
    stage: str
    role: str
    rank: int = 0
    skip: int = 0
    """The number of calls of the stage that the same process completes before the fault."""
    at: float = 0.0
    """The time at which it happened."""
    pid: int = 0

    @property
    def needs_own_ray(self) -> bool:
        """Return whether the fault hits processes of Ray, or the driver, whose death must also end its Ray."""
        return self.kind in ("kill host", "stop host", "kill GCS", "kill driver")

    @property
    def is_in_result(self) -> bool:
        """Return whether a result is lost, doubled or corrupted, which the process itself survives."""
        return self.kind.endswith(" result")

    @property
    def victim(self) -> str | None:
        """Return the start of the names of the processes that die or stop; None if no process does."""
        if self.kind in ("kill host", "stop host", "kill GCS"):
            return ""
        if self.kind not in ("kill worker", "kill engine", "stop"):
            return None
        return "the process of" if self.role == "rewards" else f"role {self.role}: worker {self.rank} "


class Faults:
    """The faults of a run that have not happened, as one process of the run sees them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._met: dict[int, int] = {}

    def meet(self, role: str, rank: int, method: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return what ``call`` returns for the arguments, unless a fault is meant for this call."""
        fault = self._claim(role, rank, method)
        return call(*arguments) if fault is None else self._happen(fault, call, arguments)

    def _claim(self, role: str, rank: int, method: str) -> Fault | None:
        with suppress(FileNotFoundError, StopIteration):
            file = next(iter(sorted(self._folder.glob("fault-*.json"))))
            fault = Fault(**json.loads(file.read_text()))
            methods = _CALLS[fault.stage].get(role, ())
            if methods and fault.is_in_result:
                methods = _RESULTS.get(role, methods) if fault.stage == "generate" else methods
            if fault.role != role or fault.rank != rank or method not in methods:
                return None
            self._met[fault.number] = self._met.get(fault.number, 0) + 1
            if self._met[fault.number] <= fault.skip:
                return None
            fault = replace(fault, at=time.time(), pid=os.getpid())
            happened = file.with_name(f"happened-{fault.number}.json")
            file.rename(happened)
            happened.write_text(json.dumps(asdict(fault)))
            return fault
        return None

    def _happen(self, fault: Fault, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if fault.kind in ("kill worker", "kill engine"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "kill driver":
            os.kill(int((self._folder / "driver").read_text()), signal.SIGKILL)
        elif fault.kind == "kill GCS":
            self._signal("gcs_server", "", signal.SIGKILL)
        elif fault.kind == "kill host":
            self._signal("raylet", _LOST_HOST, signal.SIGKILL)
        elif fault.kind == "stop host":
            self._signal("raylet", _LOST_HOST, signal.SIGSTOP)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "slow":
            start = time.perf_counter()
            result = call(*arguments)
            time.sleep(max(_SLOWER * (time.perf_counter() - start), _SLOW_S))
            return result
        elif fault.kind == "exception":
            raise RuntimeError(f"injected at {fault.stage}")
        elif fault.kind == "delayed call":
            time.sleep(_DELAY_S)
        elif fault.kind == "dropped call":
            threading.Event().wait()
        elif fault.kind == "full disk":
            return _without_space(call, arguments, for_good=fault.role == "driver")
        elif fault.kind == "out of memory":
            _use_up_memory()
        elif fault.stage == "sync":
            return call(_damaged_weights(fault.kind, arguments[0]), *arguments[1:])
        else:
            return _damaged(fault.kind, call(*arguments))
        return call(*arguments)

    def _signal(self, daemon: str, option: str, number: int) -> None:
        """Send a signal to a daemon of the run's Ray with this option and to its descendants, this process last."""
        root = int((self._folder / "root").read_text())
        found = [pid for pid in descendants(root) if _is_daemon(pid, daemon, option)]
        assert found, f"Ray has no {daemon} with {option}"
        every = {below for pid in found for below in (pid, *descendants(pid))}
        for pid in sorted(every, key=lambda pid: pid == os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _is_daemon(pid: int, name: str, option: str) -> bool:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return words[0].endswith(name) and any(word.startswith(option) for word in words)
    return False


def _without_space(call: Callable[..., Any], arguments: tuple[Any, ...], *, for_good: bool) -> Any:
    """Call with a limit on the size of files, as if the disk were full during the call, or ``for_good``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_SIZE, before[1]))
    try:
        return call(*arguments)
    finally:
        if not for_good:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _use_up_memory() -> None:
    """Take memory up to a limit that is hardly above what the process has. Raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _FREE_MEMORY, before[1]))
    try:
        np.ones(_FREE_MEMORY)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _damaged(kind: str, result: Any) -> Any:
    """Return the result without its last row, with that row twice, or with invalid values."""
    if not isinstance(result, Batch) or not len(_rows(result)):
        return None
    rows = np.arange(len(_rows(result)))
    if kind == "lost result":
        return result.take(rows[:-1])
    if kind == "doubled result":
        return result.take(np.append(rows, rows[-1:]))
    if isinstance(result, Rollouts):
        return replace(result, logprobs=result.logprobs.take(rows[:-1]))
    if isinstance(result, Rewards):
        return replace(result, values=np.append(result.values[:-1], np.float32(np.inf)))
    if isinstance(result, RolloutAdvantages):
        runs = result.values.run_values.copy()
        runs[-1] = np.inf
        return replace(result, values=type(result.values)(runs, result.values.lengths))
    assert isinstance(result, Logprobs)
    values = result.values.values.copy()
    values[-1] = np.nan
    return replace(result, values=result.values.like(values))


def _rows(batch: Batch) -> Any:
    first = next(iter(vars(batch).values()))
    return first if not isinstance(first, Packed) else first.lengths


def _damaged_weights(kind: str, weights: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    """Return the weights without the last one, with it twice, or with one that has another shape."""
    tensors = list(weights)
    if kind == "lost result":
        return tensors[:-1]
    if kind == "doubled result":
        return [*tensors, tensors[-1]]
    name, tensor = tensors[-1]
    return [*tensors[:-1], (name, tensor.flatten()[:-1])]


class FaultyProcess(ObjectProcess):
    """A process around a node or the data, which meets faults."""

    folder: Path
    """The folder of the run's faults."""

    def __init__(self) -> None:
        super().__init__()
        self._faults = Faults(self.folder)

    def call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        def call(*given: Any) -> Any:
            return super(FaultyProcess, self).call(method, *given, **named)

        return self._faults.meet("rewards", 0, method, call, arguments)


class FaultyWorker(EngineWorker):
    """A worker whose engine meets faults. One of two engines forgets one in every ``forgets_one_in`` requests."""

    folder: Path
    forgets_one_in = 0
    forgets_seed = 0

    def __init__(self) -> None:
        super().__init__()
        self._faults = Faults(self.folder)
        self._role, self._rank = "", 0

    def build(self, engine: str, spec: Any) -> None:
        from benchmarks.scripted_engine import ScriptedEngine

        self._role, self._rank = spec.role, spec.rank
        super().build(engine, spec)
        if spec.role == "rollout":
            self._engine_thread = None
            self._engine = ScriptedEngine(spec)
            self._engine.core.forgets = self._forgets
            step = self._engine.core.step
            self._engine.core.step = lambda: self._faults.meet(self._role, self._rank, "step", step, ())

    def _forgets(self, number: int) -> bool:
        """Return whether the engine forgets a request, and note that it does."""
        if not self.forgets_one_in or self._rank != self.forgets_seed % 2:
            return False
        block, place = divmod(number, self.forgets_one_in)
        if place != np.random.default_rng((self.forgets_seed, block)).integers(self.forgets_one_in):
            return False
        with (self.folder / "forgotten").open("a") as file:
            file.write(f"{number}\n")
        return True

    def call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        def call(*given: Any) -> Any:
            return super(FaultyWorker, self).call(method, *given, **named)

        if method == "load_weights" and not self._engine.shapes:
            # An engine learns the shapes of the model from its first weights; others read them from the model's files.
            return call(*arguments)
        return self._faults.meet(self._role, self._rank, method, call, arguments)

    def next_bucket(self) -> Any:
        return self._faults.meet(self._role, self._rank, "next_bucket", super().next_bucket, ())


DRIVER: list[Faults] = []
"""The faults of the run that this process drives."""


@dataclass(frozen=True, kw_only=True)
class FaultyAdvantage(GroupAdvantage, Node, kind="faulty_advantage", unit="group"):
    """GRPO's advantage, which the driver computes, and which meets faults."""

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        advantages: RolloutAdvantages = DRIVER[-1].meet("driver", 0, "run", super().run, (rollouts, rewards))
        return advantages
