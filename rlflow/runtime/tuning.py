"""How large a setting of a role should be, found while a run goes: pure, told what each step took.

The first steps are the trials. None is thrown away: what training comes to does not depend on how a batch is cut.

Tunes a run's roles while it goes, and writes what it found to ``tuning.json``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from rlflow.compiler.graph import Graph, resampled_nodes
from rlflow.compiler.plan import Plan
from rlflow.engines.registry import engine_class
from rlflow.resources.workload import Workload
from rlflow.runtime.protocols import Observer
from rlflow.runtime.ray.engine_specs import num_sequences

# A setting is raised, or lowered, by so much at a time.
_FACTOR = 1.5
# What is gained is more than noise when throughput grows by more than this.
_GAIN = 1.03
# Steps of each trial, of which the fastest counts; and, when adapting, steps between two rounds of trials.
_STEPS, _REST = 2, 20
# Of the memory, the share up to which a setting is tried, and from which on it is lowered.
_ROOM, _FULL = 0.9, 0.97


@dataclass(frozen=True, kw_only=True)
class Trial:
    setting: int
    tokens_per_second: float
    memory_share: float
    """Of the fullest GPU or host, at the peak."""


class Climb:
    """Raises a setting while throughput grows and memory allows, and keeps the best.

    With ``adaptive`` it tries again every so many steps, upwards and downwards, and in between it is lowered in every
    step that leaves next to no memory, until the next round of trials.
    """

    def __init__(self, start: int, least: int, most: int, *, adaptive: bool = False) -> None:
        self.trials: dict[int, Trial] = {}
        """By setting, of each the last."""
        self.best: Trial | None = None
        """None until something has been tried, and for a setting that only memory led to."""
        self._start, self._least, self._most = start, min(start, least), max(start, most)
        self._adaptive = adaptive
        # How often the setting has been raised, less how often lowered; and that of the best.
        self._level = self._best_level = 0
        self._ways = [1]
        self._rates: list[float] = []
        self._used = 0.0
        self._is_warm = False

    @property
    def setting(self) -> int:
        """For the next step."""
        return self._at(self._level)

    @property
    def trying(self) -> bool:
        """Whether a trial goes on."""
        return bool(self._ways)

    def told(self, tokens: float, seconds: float, memory_share: float) -> None:
        """Of a step with ``setting``: the role's own seconds."""
        if not self._is_warm:
            # The first step loads, compiles and grows its buffers.
            self._is_warm = True
            return
        self._rates.append(tokens / seconds)
        self._used = max(self._used, memory_share)
        if self.trying:
            if len(self._rates) >= _STEPS:
                self._judge()
        elif self._adaptive and memory_share > _FULL and self._at(self._level - 1) < self.setting:
            self._level -= 1
            self.best = self.trials.get(self.setting)
            self._rates, self._used = [], 0.0
        elif self._adaptive and len(self._rates) >= _REST:
            # Lengths change as a model learns: what it did of late is what others are compared with.
            self._ways, self.best = [1, -1], None
            self._judge()

    def _at(self, level: int) -> int:
        return min(self._most, max(self._least, ceil(self._start * _FACTOR**level)))

    def _judge(self) -> None:
        trial = Trial(
            setting=self.setting, tokens_per_second=max(self._rates[-_STEPS:]), memory_share=round(self._used, 4)
        )
        self.trials[self.setting] = trial
        if self.best is None:
            self.best, self._best_level = trial, self._level
        elif trial.tokens_per_second > _GAIN * self.best.tokens_per_second:
            # Having gone one way, the other leads back.
            self.best, self._best_level, self._ways = trial, self._level, self._ways[:1]
        else:
            self._ways.pop(0)
        self._go()

    def _go(self) -> None:
        """To the next trial; when there is none, back to the best."""
        assert self.best is not None
        self._rates, self._used = [], 0.0
        while self._ways:
            self._level = self._best_level + self._ways[0]
            if self.setting != self.best.setting and self._has_room(self.best, self.setting):
                return
            self._ways.pop(0)
        self._level = self._best_level

    def _has_room(self, here: Trial, setting: int) -> bool:
        """By the line through ``here`` and the next smaller setting that was tried; where none was, as if all memory
        grew with the setting."""
        if setting < here.setting:
            return True
        smaller = [trial for trial in self.trials.values() if trial.setting < here.setting]
        slope = here.memory_share / here.setting
        if smaller:
            last = max(smaller, key=lambda trial: trial.setting)
            slope = max(0.0, here.memory_share - last.memory_share) / (here.setting - last.setting)
        return here.memory_share + slope * (setting - here.setting) <= _ROOM


FILE = "tuning.json"
# An engine that is tuned is started with places for so many times the sequences that it begins with: vLLM takes memory
# for them, and records graphs.
_PLACES = 2


@dataclass(frozen=True)
class _Knob:
    """One setting of a role."""

    role: str
    name: str
    """``micro_batch_tokens`` or ``max_num_seqs``: engines have a method ``set_<name>``."""
    planned: int
    climb: Climb


def with_places(plan: Plan) -> Plan:
    """With more places in engines that take new samples while they write, as far as a step has samples for them. None
    of these is used before it is tried."""
    workload = plan.workload
    memory = dict(plan.prediction.memory)
    for role in memory:
        if _can(plan, role, "max_num_seqs"):
            planned = num_sequences(plan, role)
            places = max(planned, min(_PLACES * planned, _samples_each(plan, workload, role)))
            memory[role] = replace(memory[role], sequences=places)
    return replace(plan, prediction=replace(plan.prediction, memory=memory))


class Tuner(Observer):
    """An observer that changes what it observes: the tokens of a micro-batch of roles that train or score, where the
    recipe leaves them open, and the sequences that an engine writes at once. It begins with those of the plan."""

    def __init__(self, engines: Mapping[str, Any], *, adaptive: bool) -> None:
        self._engines = engines
        self._adaptive = adaptive
        self._knobs: list[_Knob] = []

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._file = directory / FILE
        self._plan = plan
        workload = plan.workload
        self._knobs = list(_knobs(plan, workload, adaptive=self._adaptive))
        self._tokens = {knob.role: _tokens_metric(plan.graph, knob.role) for knob in self._knobs}
        self._predicted = {knob.role: _predicted(plan, workload, knob.role) for knob in self._knobs}
        for knob in self._knobs:
            self._set(knob)
            # What it held before its first step is none of its trials.
            self._memory_share(knob)
        self._write()

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        tuned = [knob for knob in self._knobs if knob.climb.trying or self._adaptive]
        for knob in tuned:
            before = knob.climb.setting
            nodes = [node.name for node in self._plan.graph.nodes if node.role == knob.role]
            seconds = sum(metrics.get(f"seconds/{name}", 0.0) for name in nodes)
            if not seconds:
                continue  # nothing was found to train on
            knob.climb.told(metrics[self._tokens[knob.role]], seconds, self._memory_share(knob))
            if knob.climb.setting != before:
                self._set(knob)
        if tuned:
            self._write()

    def _set(self, knob: _Knob) -> None:
        getattr(self._engines[knob.role], f"set_{knob.name}")(knob.climb.setting)

    def _memory_share(self, knob: _Knob) -> float:
        """Nothing for engines that write: they take what memory they will ever have when they start."""
        return float(self._engines[knob.role].memory_share()) if knob.name == "micro_batch_tokens" else 0.0

    def _write(self) -> None:
        content = {
            knob.role: {
                "setting": knob.name,
                "planned": knob.planned,
                "best": knob.climb.best.setting if knob.climb.best else None,
                "trying": knob.climb.trying,
                "predicted": self._predicted[knob.role],
                "trials": [
                    asdict(trial) for trial in sorted(knob.climb.trials.values(), key=lambda trial: trial.setting)
                ],
            }
            for knob in self._knobs
        }
        beside = self._file.with_suffix(".writing")
        beside.write_text(json.dumps(content, indent=1))
        beside.rename(self._file)


def _can(plan: Plan, role: str, name: str) -> bool:
    return hasattr(engine_class(plan.recipe.roles[role].engine), f"set_{name}")


def _knobs(plan: Plan, workload: Workload, *, adaptive: bool) -> Iterator[_Knob]:
    """Each between the least that works and all that the role can have at once."""
    for role, written in plan.recipe.roles.items():
        tasks, layout = workload.of(role), plan.roles[role].layout
        passes = plan.graph.capabilities(role) & {"Trains", "Scores", "Values", "Evaluates"}
        if passes and written.micro_batch_tokens == "auto" and _can(plan, role, "micro_batch_tokens"):
            most = max(task.samples * task.longest * task.epochs / task.minibatches for task in tasks)
            least = max(task.longest for task in tasks)
            climb = Climb(layout.micro_batch_tokens, least, ceil(most / layout.data_parallel_size), adaptive=adaptive)
            yield _Knob(role, "micro_batch_tokens", layout.micro_batch_tokens, climb)
        elif _can(plan, role, "max_num_seqs"):
            start = num_sequences(plan, role)
            climb = Climb(start, 1, num_sequences(with_places(plan), role), adaptive=adaptive)
            yield _Knob(role, "max_num_seqs", start, climb)


def _tokens_metric(graph: Graph, role: str) -> str:
    """The metric that counts the response tokens a role works on in a step: all of them, or those that rounds have
    chosen."""
    names = [node.name for node in resampled_nodes(graph)]
    chosen = any(node.role == role and node.name not in names for node in graph.nodes)
    return f"{names[-1]}/tokens" if names and chosen else "tokens"


def _samples_each(plan: Plan, workload: Workload, role: str) -> int:
    """Of a step, for each of the role's workers."""
    return max(ceil(task.samples / plan.roles[role].layout.data_parallel_size) for task in workload.of(role))


def _predicted(plan: Plan, workload: Workload, role: str) -> dict[str, float | None]:
    """Of the plan's own setting: response tokens a second in the role's nodes, and the share of a GPU's memory."""
    writing = [task for task in workload.tasks if task.kind == "generate"] or workload.tasks[:1]
    tokens = sum(task.samples * task.responses.mean for task in writing)
    if _tokens_metric(plan.graph, role) != "tokens":
        tokens /= plan.recipe.expect.rounds
    seconds = sum(plan.prediction.nodes[task.node].seconds for task in workload.of(role))
    sizes = {host.name: plan.cluster.memory_gib(host) for host in plan.cluster.hosts}
    shares = [
        gib / size
        for host, gpus in plan.prediction.memory[role].peak_gib.items()
        if (size := sizes[host]) is not None
        for gib in gpus.values()
    ]
    return {"tokens_per_second": tokens / seconds if seconds else None, "memory_share": max(shares, default=None)}
