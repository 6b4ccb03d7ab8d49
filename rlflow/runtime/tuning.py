"""Tuning while a run goes: micro-batches and concurrent sequences grow as long as throughput does and memory allows.

The first steps are the trials. No step is wasted: the result of training does not depend on how a batch is cut. What
was found is written to ``tuning.json``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from rlflow.compiler.graph import Graph, resampled_nodes
from rlflow.compiler.plan import Plan
from rlflow.engines.registry import engine_kind
from rlflow.runtime.engine_specs import num_sequences
from rlflow.runtime.protocols import Observer
from rlflow.system.text_files import replace_text

FILE = "tuning.json"

# A setting is raised, or lowered, by this factor.
_FACTOR = 1.5
# Throughput must grow by this factor to be more than noise.
_GAIN = 1.03
# Steps of each trial, of which the fastest counts; and steps between two rounds of trials when adaptive.
_TRIAL_STEPS, _REST_STEPS = 2, 20
# The share of memory up to which a setting is tried, and the share above which it is lowered.
_MAX_TRIED_SHARE, _FULL_SHARE = 0.9, 0.97
# Engines that are tuned start with slots for this many times the planned sequences: vLLM allocates memory for them, and
# records graphs.
_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The measurements of a few steps with one setting."""

    setting: int
    tokens_per_second: float
    memory_share: float
    """The peak share of the fullest GPU or host."""


class HillClimb:
    """A search that raises a setting while throughput grows and memory allows, and keeps the best.

    When ``adaptive``, it tries again after every few steps, upwards and downwards. In between, a step that leaves next
    to no memory lowers the setting until the next round of trials.
    """

    def __init__(self, start: int, least: int, largest: int, *, adaptive: bool = False) -> None:
        self.trials: dict[int, Trial] = {}
        """The last trial of each setting."""
        self.best: Trial | None = None
        """The best trial; None before the first one, and for a setting that was lowered for its memory untried."""
        self._start, self._least, self._most = start, min(start, least), max(start, largest)
        self._adaptive = adaptive
        # How often the setting has been raised, minus how often lowered; and the same of the best trial.
        self._level = self._best_level = 0
        self._directions = [1]
        self._rates: list[float] = []
        self._max_share = 0.0
        self._is_warm = False

    @property
    def setting(self) -> int:
        """Return the setting for the next step."""
        return self._setting_at(self._level)

    @property
    def is_trying(self) -> bool:
        """Return whether a trial is in progress."""
        return bool(self._directions)

    def record(self, tokens: float, seconds: float, memory_share: float) -> None:
        """Record a step with ``setting``: the tokens and the seconds of the role's own nodes."""
        if not self._is_warm:
            # The first step loads, compiles and allocates buffers.
            self._is_warm = True
            return
        self._rates.append(tokens / seconds)
        self._max_share = max(self._max_share, memory_share)
        if self.is_trying:
            if len(self._rates) >= _TRIAL_STEPS:
                self._end_trial()
        elif self._adaptive and memory_share > _FULL_SHARE and self._setting_at(self._level - 1) < self.setting:
            self._level -= 1
            self.best = self.trials.get(self.setting)
            self._rates, self._max_share = [], 0.0
        elif self._adaptive and len(self._rates) >= _REST_STEPS:
            # Lengths change as a model learns, so trials are compared with the latest steps.
            self._directions, self.best = [1, -1], None
            self._end_trial()

    def _setting_at(self, level: int) -> int:
        return min(self._most, max(self._least, ceil(self._start * _FACTOR**level)))

    def _end_trial(self) -> None:
        """Compare the trial with the best one, and start the next."""
        trial = Trial(
            setting=self.setting,
            tokens_per_second=max(self._rates[-_TRIAL_STEPS:]),
            memory_share=round(self._max_share, 4),
        )
        self.trials[self.setting] = trial
        if self.best is None:
            self.best, self._best_level = trial, self._level
        elif trial.tokens_per_second > _GAIN * self.best.tokens_per_second:
            # The other direction would lead back.
            self.best, self._best_level, self._directions = trial, self._level, self._directions[:1]
        else:
            self._directions.pop(0)
        self._start_trial()

    def _start_trial(self) -> None:
        """Move to the setting of the next trial; without one, back to the best."""
        assert self.best is not None
        self._rates, self._max_share = [], 0.0
        while self._directions:
            self._level = self._best_level + self._directions[0]
            if self.setting != self.best.setting and self._fits(self.best, self.setting):
                return
            self._directions.pop(0)
        self._level = self._best_level

    def _fits(self, trial: Trial, setting: int) -> bool:
        """Return whether a setting probably fits in memory.

        Memory is extrapolated from ``trial`` and the next smaller setting that was tried; without one, as if all of it
        grew with the setting.
        """
        if setting < trial.setting:
            return True
        smaller = [other for other in self.trials.values() if other.setting < trial.setting]
        slope = trial.memory_share / trial.setting
        if smaller:
            last = max(smaller, key=lambda other: other.setting)
            slope = max(0.0, trial.memory_share - last.memory_share) / (trial.setting - last.setting)
        return trial.memory_share + slope * (setting - trial.setting) <= _MAX_TRIED_SHARE


@dataclass(frozen=True)
class _TunedSetting:
    """One setting of a role."""

    role: str
    name: str
    """``micro_batch_tokens`` or ``max_num_seqs``: engines have a method ``set_<name>``."""
    planned: int
    climb: HillClimb


def with_spare_slots(plan: Plan) -> Plan:
    """Return the plan with more slots in engines that can change their number of sequences while they run.

    There are at most as many slots as a step has samples. A slot beyond the planned ones is not used before it is
    tried.
    """
    memory = dict(plan.prediction.memory)
    for role in memory:
        if _is_tunable(plan, role, "max_num_seqs"):
            planned = num_sequences(plan, role)
            slots = max(planned, min(_SLOTS * planned, _samples_per_worker(plan, role)))
            memory[role] = replace(memory[role], sequences=slots)
    return replace(plan, prediction=replace(plan.prediction, memory=memory))


class Tuner(Observer):
    """An observer that tunes the roles of a run, starting with the settings of the plan.

    It tunes the tokens of a micro-batch of roles that train or score, where the recipe leaves them open, and the number
    of sequences that an engine generates at once.
    """

    def __init__(self, engines: Mapping[str, Any], *, adaptive: bool) -> None:
        self._engines = engines
        self._adaptive = adaptive
        self._tuned: list[_TunedSetting] = []

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._file = directory / FILE
        self._plan = plan
        self._tuned = list(_tuned_settings(plan, adaptive=self._adaptive))
        self._tokens = {tuned.role: _tokens_metric(plan.graph, tuned.role) for tuned in self._tuned}
        self._predicted = {tuned.role: _predicted(plan, tuned.role) for tuned in self._tuned}
        for tuned in self._tuned:
            self._apply(tuned)
            # Resets the peak: memory from before the first step belongs to no trial.
            self._memory_share(tuned)
        self._write()

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        active = [tuned for tuned in self._tuned if tuned.climb.is_trying or self._adaptive]
        for tuned in active:
            before = tuned.climb.setting
            nodes = [node.name for node in self._plan.graph.nodes if node.role == tuned.role]
            seconds = sum(metrics.get(f"seconds/{name}", 0.0) for name in nodes)
            if not seconds:
                continue  # the step had nothing to train on
            tuned.climb.record(metrics[self._tokens[tuned.role]], seconds, self._memory_share(tuned))
            if tuned.climb.setting != before:
                self._apply(tuned)
        if active:
            self._write()

    def _apply(self, tuned: _TunedSetting) -> None:
        getattr(self._engines[tuned.role], f"set_{tuned.name}")(tuned.climb.setting)

    def _memory_share(self, tuned: _TunedSetting) -> float:
        """Return the peak share of memory since the last call; 0 for engines that generate, which preallocate it."""
        return float(self._engines[tuned.role].memory_share()) if tuned.name == "micro_batch_tokens" else 0.0

    def _write(self) -> None:
        content = {
            tuned.role: {
                "setting": tuned.name,
                "planned": tuned.planned,
                "best": tuned.climb.best.setting if tuned.climb.best else None,
                "trying": tuned.climb.is_trying,
                "predicted": self._predicted[tuned.role],
                "trials": [asdict(tuned.climb.trials[setting]) for setting in sorted(tuned.climb.trials)],
            }
            for tuned in self._tuned
        }
        replace_text(self._file, json.dumps(content, indent=1))


def _is_tunable(plan: Plan, role: str, name: str) -> bool:
    return hasattr(engine_kind(plan.recipe.roles[role].engine).engine, f"set_{name}")


def _tuned_settings(plan: Plan, *, adaptive: bool) -> Iterator[_TunedSetting]:
    """Yield the setting to tune of each role, between the least that works and all that a step can use at once."""
    for name, role in plan.recipe.roles.items():
        tasks, layout = plan.workload.of(name), plan.roles[name].layout
        passes = plan.graph.capabilities(name) & {"Trains", "Scores", "Values", "Evaluates"}
        if passes and role.micro_batch_tokens == "auto" and _is_tunable(plan, name, "micro_batch_tokens"):
            largest = max(task.samples * task.longest * task.epochs / task.minibatches for task in tasks)
            least = max(task.longest for task in tasks)
            start = layout.micro_batch_tokens
            climb = HillClimb(start, least, ceil(largest / layout.data_parallel_size), adaptive=adaptive)
            yield _TunedSetting(name, "micro_batch_tokens", start, climb)
        elif _is_tunable(plan, name, "max_num_seqs"):
            start = num_sequences(plan, name)
            climb = HillClimb(start, 1, num_sequences(with_spare_slots(plan), name), adaptive=adaptive)
            yield _TunedSetting(name, "max_num_seqs", start, climb)


def _tokens_metric(graph: Graph, role: str) -> str:
    """Return the metric that counts the response tokens of a role's step: all, or those of selected prompts."""
    names = [node.name for node in resampled_nodes(graph)]
    reads_selection = any(node.role == role and node.name not in names for node in graph.nodes)
    return f"{names[-1]}/tokens" if names and reads_selection else "tokens"


def _samples_per_worker(plan: Plan, role: str) -> int:
    """Return how many samples of a step each worker of the role has."""
    workers = plan.roles[role].layout.data_parallel_size
    return max(ceil(task.samples / workers) for task in plan.workload.of(role))


def _predicted(plan: Plan, role: str) -> dict[str, float | None]:
    """Return the prediction for the plan's setting: response tokens per second, and the share of a GPU's memory."""
    generating = [task for task in plan.workload.tasks if task.kind == "generate"] or plan.workload.tasks[:1]
    tokens = sum(task.samples * task.responses.mean for task in generating)
    if _tokens_metric(plan.graph, role) != "tokens":
        tokens /= plan.recipe.expect.rounds
    seconds = sum(plan.prediction.nodes[task.node].seconds for task in plan.workload.of(role))
    sizes = {host.name: plan.cluster.memory_gib(host) for host in plan.cluster.hosts}
    shares = [
        gib / size
        for host, gpus in plan.prediction.memory[role].peak_gib.items()
        if (size := sizes[host]) is not None
        for gib in gpus.values()
    ]
    return {"tokens_per_second": tokens / seconds if seconds else None, "memory_share": max(shares, default=None)}
