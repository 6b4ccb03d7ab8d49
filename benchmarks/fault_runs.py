"""Runs with faults: each in its own process, resumed until it is finished, then compared with an undisturbed run."""

import json
import os
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from select import select
from time import time
from typing import Any
from unittest.mock import patch

import rlflow
from benchmarks.fault_hosts import HOSTS, Hosts, shared_hosts, wait_for_end
from benchmarks.fault_injection import DRIVER, Fault, Faults, FaultyProcess, FaultyWorker
from benchmarks.faulty_process import FINISHED, TYPED, UNTYPED
from benchmarks.kills import contents, names
from rlflow.commands.calibrate.probes import Probe, recipe_of, write_recipe
from rlflow.compiler.plan import Plan
from rlflow.errors import EngineError, UserError
from rlflow.report.records import MetricsWriter, SampleLog
from rlflow.runtime.checkpoint import checkpoints
from rlflow.runtime.protocols import Observer
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run
from rlflow.system.processes import become_subreaper, descendants, die_with_parent, kill

SHORT_SILENCE_S = 6.0
_SHORT_LIMIT_S = 12.0
# A run that takes longer hangs.
_HANG_S = 300.0
_MOST_ATTEMPTS = 8
_SOMETIMES_WRITTEN = ("skipped/", "tensorboard/")
_METRICS_OF_FAULTS = ("rollout/engines/", "store/")


@dataclass(frozen=True)
class End:
    """The end of a fault: what became of the run."""

    fault: Fault
    how: str
    detection: float | None
    """Seconds until the run noticed it; None for one that no run notices."""


@dataclass
class Outcome:
    """A run with faults, which is finished or cannot be."""

    name: str
    usual_limits: bool
    ends: list[End] = field(default_factory=list)
    num_forgotten: int = 0
    slowest_end_s: float = 0.0
    """The longest time after which a run's processes had ended."""
    compared: bool = False
    """True for a run that has been compared with the undisturbed one."""
    problems: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the faults of the run and its problems, one line each."""
        faults = ", ".join(
            f"{end.fault.kind} at {end.fault.stage}: {end.how}"
            + ("" if end.detection is None else f" ({end.detection:.1f} s)")
            for end in self.ends
        )
        problems = [f"{number} {name}" for name, number in self.problems.items()]
        line = f"{self.name}, ended within {self.slowest_end_s:.1f} s: {faults}"
        return "\n  ".join([line, *problems, *self.remarks])


@dataclass(frozen=True)
class Undisturbed:
    """A run without a fault."""

    folder: Path
    size: "Size"
    names: frozenset[str]


@dataclass(frozen=True)
class Size:
    """The size of a run. Each step has ``num_prompts`` times ``group_size`` rollouts."""

    steps: int
    num_prompts: int
    group_size: int
    engine: str = "torch"
    """The engine that trains: ``torch`` in one process, or ``fsdp`` in two."""

    def ranks(self, role: str) -> int:
        """Return how many processes a role has."""
        return 2 if role == "rollout" or (role, self.engine) == ("actor", "fsdp") else 1


SMALL, LONG, WIDE = Size(8, 4, 4), Size(16, 4, 4), Size(3, 64, 8)


@cache
def plan_of(folder: Path, size: Size) -> Plan:
    """Return the plan of runs of this size: two engines on two hosts, a trainer, a reference."""
    probe = Probe(
        name=f"faults_{size.steps}",
        hidden_size=32,
        num_layers=2,
        batch_size=size.num_prompts,
        group_size=size.group_size,
        max_tokens=6,
    )
    recipe = recipe_of(probe)
    trained = {"engine": size.engine, "gpus": size.ranks("actor"), "optimizer": {"learning_rate": 1e-2}}
    recipe["roles"]["actor"] |= trained
    recipe["roles"]["rollout"] = {"engine": "fake", "gpus": size.ranks("rollout")}
    recipe["roles"]["reference"] = {"engine": "fake", "gpus": 1}
    recipe["graph"]["rewards"]["function"] = "benchmarks.scripted_engine:mean_digit"
    recipe["graph"]["advantages"] = {"node": "benchmarks.fault_injection:FaultyAdvantage"}
    recipe |= {"steps": size.steps, "stop_after_skipped_steps": 1, "checkpoints": {"every": 2}}
    recipe["evaluation"] = {"every": 4, "num_prompts": 6}
    return rlflow.compile(rlflow.load([f"recipe={write_recipe(recipe, folder)}"]), HOSTS)


class _ArmedObserver(Observer):
    """An observer through which faults happen to the driver between two steps."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._faults.meet("driver", 0, "stepped", lambda: None, ())


@dataclass(frozen=True)
class Trial:
    """A run to which faults happen."""

    folder: Path
    expected: Undisturbed | None
    faults: Sequence[Fault]
    usual_limits: bool
    size: Size = SMALL
    forgets_one_in: int = 0
    forgets_seed: int = 0
    """The seed that draws the engine that forgets requests, and which."""

    @property
    def notes(self) -> Path:
        """Return the folder of the faults, and of what the run notes about them."""
        return self.folder.with_name(f"{self.folder.name}-faults")

    def run(self) -> Outcome:
        """Run until it is finished, and compare it with the undisturbed run."""
        become_subreaper()
        self.notes.mkdir()
        for fault in self.faults:
            (self.notes / f"fault-{fault.number:03}.json").write_text(json.dumps(asdict(fault)))
        outcome = Outcome(self.folder.name, self.usual_limits)
        for attempt in range(_MOST_ATTEMPTS):
            before = {fault.number for fault in self._happened()}
            how = self._attempt(outcome, attempt)
            new = [fault for fault in self._happened() if fault.number not in before]
            for fault in new:
                ends_run = fault is new[-1] or fault.needs_own_ray
                outcome.ends.append(End(fault, how if ends_run else "continued", self._detection(fault)))
            if how == "continued":
                break
            if how in ("hang", "untyped") or not new:
                outcome.problems["hangs" if how == "hang" else "untyped"] += 1
                outcome.remarks.append(
                    f"attempt {attempt}, {'after' if new else 'without'} a fault: {how}: {self._error()}"
                )
            if not new:
                break
        else:
            outcome.problems["unfinished"] += 1
        if (forgotten := self.notes / "forgotten").exists():
            outcome.num_forgotten = len(forgotten.read_text().splitlines())
        if self.expected is not None and how == "continued":
            outcome.problems += differences(self.folder, self.expected, outcome.remarks)
            outcome.compared = True
        return outcome

    def _happened(self) -> list[Fault]:
        files = self.notes.glob("happened-*.json")
        return sorted((Fault(**json.loads(file.read_text())) for file in files), key=lambda fault: fault.at)

    def _error(self) -> str:
        file = self.notes / "error"
        return file.read_text().strip() if file.exists() else ""

    def _attempt(self, outcome: Outcome, attempt: int) -> str:
        """Start the run, or resume it, and return how it ended."""
        hosts = None if any(fault.needs_own_ray for fault in self.faults) else shared_hosts()
        known = set(descendants(os.getpid()))
        (self.notes / "error").unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            os._exit(self._child(hosts, attempt))
        end = os.pidfd_open(child)
        is_over = bool(select([end], [], [], _HANG_S)[0])
        os.close(end)
        if not is_over:
            for pid in (*descendants(child), child):
                kill(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left, seconds = wait_for_end(known)
        outcome.slowest_end_s = max(outcome.slowest_end_s, seconds)
        if left:
            outcome.problems["leftovers"] += 1
            outcome.remarks.append(f"attempt {attempt} leaves processes: {'; '.join(left)}")
        if not is_over:
            return "hang"
        return {FINISHED: "continued", TYPED: "typed error", -9: "killed"}.get(code, "untyped")

    def _child(self, hosts: Hosts | None, attempt: int) -> int:
        parent = os.getppid()
        log = os.open(self.notes / f"log-{attempt}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            die_with_parent(parent)
            (self.notes / "driver").write_text(str(os.getpid()))
            (self.notes / "root").write_text(str(hosts.pid if hosts else os.getpid()))
            with ExitStack() as stack:
                faults = self._armed(stack)
                if hosts:
                    stack.enter_context(hosts.joined())
                observers = [_ArmedObserver(faults), MetricsWriter(), SampleLog()]
                run(
                    plan_of(self.notes, self.size),
                    self.folder,
                    RayRuntime(),
                    observers,
                    resume=bool(checkpoints(self.folder)),
                )
        except (UserError, EngineError) as error:
            (self.notes / "error").write_text(f"{type(error).__name__}: {error}")
            return TYPED
        except BaseException:
            (self.notes / "error").write_text(traceback.format_exc())
            return UNTYPED
        return FINISHED

    def _armed(self, stack: ExitStack) -> Faults:
        """Have all processes of a run meet faults, and note when the run notices that a process has ended."""
        from rlflow.runtime.ray import process

        options = {
            "folder": self.notes,
            "forgets_one_in": self.forgets_one_in,
            "forgets_seed": self.forgets_seed,
        }
        worker, beside = type("Worker", (FaultyWorker,), options), type("Process", (FaultyProcess,), options)
        as_error, ended = process._as_engine_error, process.RemoteProcess.end

        def noted_error(error: BaseException, name: str, end_error: EngineError | None) -> BaseException:
            self._note(name)
            return as_error(error, name, end_error)

        def noted_end(remote: Any, error: EngineError) -> None:
            self._note(remote.name)
            ended(remote, error)

        changes: dict[str, Any] = {
            "role_workers.EngineWorker": worker,
            "role_workers.RoleWorkers.concurrent": property(lambda workers: workers._role == "rollout"),
            "remote_objects.ObjectProcess": beside,
            "process._as_engine_error": noted_error,
            "process.RemoteProcess.end": noted_end,
        }
        if not self.usual_limits:
            changes |= {
                "watchdog.LOOK_S": 0.25,
                "watchdog.ASK_S": 1.0,
                "watchdog.NO_STEP_S": _SHORT_LIMIT_S,
                "waits.SILENCE_S": (SHORT_SILENCE_S, 60.0),
                "waits._LIMIT_S": _SHORT_LIMIT_S,
                "waits._LOADING_LIMIT_S": _SHORT_LIMIT_S,
            }
        for name, value in changes.items():
            stack.enter_context(patch(f"rlflow.runtime.ray.{name}", value))
        # No model gives the logprobs of scripted responses.
        stack.enter_context(patch("rlflow.runtime.agreement.MAX_DIFFERENCE", inf))
        DRIVER.append(Faults(self.notes))
        return DRIVER[-1]

    def _note(self, name: str) -> None:
        with (self.notes / "noticed").open("a") as file:
            file.write(f"{time()} {name}\n")

    def _detection(self, fault: Fault) -> float | None:
        """Return after how many seconds the run noticed a process that died or stopped."""
        victim = fault.victim
        file = self.notes / "noticed"
        if victim is None or not file.exists():
            return None
        notes = [line.split(" ", 1) for line in file.read_text().splitlines()]
        seconds = [float(at) - fault.at for at, name in notes if name.startswith(victim)]
        return min((after for after in seconds if after >= 0), default=None)


def undisturbed(folder: Path, size: Size = SMALL) -> Undisturbed:
    """Make a run without a fault, and check that each of its steps changes the model."""
    trial = Trial(folder / f"undisturbed-{size.steps}", None, (), usual_limits=True, size=size)
    outcome = trial.run()
    assert not outcome.problems, outcome.remarks
    expected = Undisturbed(trial.folder, size, names(trial.folder))
    files = [step / "actor" / "weights-00000-00000.safetensors" for step in checkpoints(trial.folder)]
    weights = [file.read_bytes() for file in files]
    assert len(set(weights)) == len(weights) > 1, "steps do not change the model"
    return expected


def differences(folder: Path, expected: Undisturbed, remarks: list[str]) -> Counter[str]:
    """Return how often a finished run differs from the undisturbed one."""
    problems: Counter[str] = Counter()
    for name in ("metrics.jsonl", "samples.jsonl"):
        ours, theirs = (_lines(run / name) for run in (folder, expected.folder))
        numbers = Counter(key for key, _ in ours)
        problems["doubled"] += sum(numbers.values()) - len(numbers)
        problems["lost"] += len({key for key, _ in theirs} - numbers.keys())
        problems["metrics_differ"] += dict(ours) != dict(theirs)
    final = f"checkpoints/step-{expected.size.steps:06d}/actor"
    same = all(contents(folder / part) == contents(expected.folder / part) for part in (final, "model/actor"))
    problems["different_weights"] += not same
    left = {name for name in names(folder) - expected.names if not name.startswith(_SOMETIMES_WRITTEN)} - {"skipped"}
    if left:
        problems["leftovers"] += 1
        remarks.append(f"leaves {', '.join(sorted(left))}")
    return +problems


def _lines(file: Path) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Return the lines by step and kind, without times and without figures that faults change."""
    lines: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []
    for line in map(json.loads, file.read_text("utf-8").splitlines()):
        kind = line.get("choice", "step" if "tokens" in line else "evaluation")
        values = {key: value for key, value in line.items() if "second" not in key}
        values = {key: value for key, value in values.items() if not key.startswith(_METRICS_OF_FAULTS)}
        lines.append(((line["step"], kind), values))
    return lines
