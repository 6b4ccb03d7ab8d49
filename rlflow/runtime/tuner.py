"""Tunes the micro-batches of a run's roles while it goes, and writes what it found to ``tuning.json``."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any, Literal

from rlflow.compiler.lower import lower
from rlflow.compiler.plan import Plan
from rlflow.engines.registry import engine_class
from rlflow.resources.workload import Workload
from rlflow.runtime.base import Report
from rlflow.runtime.tuning import Climb

Tune = bool | Literal["adaptive"]
FILE = "tuning.json"


class Tuner:
    """An observer that changes what it observes: of every role whose engine can, and whose recipe leaves it open, the
    tokens of a micro-batch."""

    def __init__(self, engines: Mapping[str, Any], *, adaptive: bool) -> None:
        self._engines = engines
        self._adaptive = adaptive
        self._climbs: dict[str, Climb] = {}

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        self._file = directory / FILE
        self._plan = plan
        workload = lower(plan.recipe, plan.graph).workload
        for role, written in plan.recipe.roles.items():
            passes = plan.graph.capabilities(role) & {"Trains", "Scores", "Values"}
            can = passes and hasattr(engine_class(written.engine), "set_micro_batch_tokens")
            if can and written.micro_batch_tokens == "auto":
                start = plan.roles[role].layout.micro_batch_tokens
                self._climbs[role] = Climb(start, *_bounds(plan, workload, role), adaptive=self._adaptive)
                # What it held before its first step is none of its trials.
                self._engines[role].memory_share()
        self._predicted = {role: _predicted(plan, workload, role) for role in self._climbs}

    def evaluated(self, step: int, reward: float) -> None:
        """Nothing of it is tuned."""

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        for role, climb in self._climbs.items():
            before = climb.setting
            seconds = sum(metrics[f"seconds/{node.name}"] for node in self._plan.graph.nodes if node.role == role)
            climb.told(metrics["tokens"], seconds, self._engines[role].memory_share())
            if climb.setting != before:
                self._engines[role].set_micro_batch_tokens(climb.setting)
        self._write()

    def ended(self, report: Report) -> None:
        """All is written."""

    def close(self) -> None:
        """It holds nothing open."""

    def _write(self) -> None:
        content = {
            role: {
                "planned": self._plan.roles[role].layout.micro_batch_tokens,
                "best": climb.best.setting if climb.best else None,
                "trying": climb.trying,
                "predicted": self._predicted[role],
                "trials": [asdict(trial) for trial in climb.trials],
            }
            for role, climb in self._climbs.items()
        }
        beside = self._file.with_suffix(".writing")
        beside.write_text(json.dumps(content, indent=1))
        beside.rename(self._file)


def _bounds(plan: Plan, workload: Workload, role: str) -> tuple[int, int]:
    """The longest sequence, and all that the role can have at once."""
    tasks = workload.of(role)
    ranks = plan.roles[role].layout.data_parallel_size
    most = max(ceil(task.samples * task.longest * task.epochs / task.minibatches / ranks) for task in tasks)
    return max(task.longest for task in tasks), most


def _predicted(plan: Plan, workload: Workload, role: str) -> dict[str, float | None]:
    """Of the plan's own setting: response tokens a second in the role's nodes, and the share of a GPU's memory."""
    writing = [task for task in workload.tasks if task.kind == "generate"] or workload.tasks[:1]
    tokens = sum(task.samples * task.responses.mean for task in writing)
    seconds = sum(plan.prediction.nodes[task.node].seconds for task in workload.of(role))
    sizes = {host.name: plan.cluster.memory_gib(host) for host in plan.cluster.hosts}
    shares = [
        gib / size
        for host, gpus in plan.prediction.memory[role].peak_gib.items()
        if (size := sizes[host]) is not None
        for gib in gpus.values()
    ]
    return {"tokens_per_second": tokens / seconds if seconds else None, "memory_share": max(shares, default=None)}
