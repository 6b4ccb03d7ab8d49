"""Measurements of a run beside the predictions of its plan: the time of each node, the memory of each process."""

from collections.abc import Mapping
from statistics import fmean, median

from rlflow.compiler.plan import Plan
from rlflow.resources.layout import GIB

Pair = Mapping[str, float | None]
"""A figure as it was ``predicted`` and ``measured``; None where only the other one is known."""
_COPY = "copy"
_AGE = "overlap/staleness_"


class StepTimes:
    """The times of all steps of a run in this process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seconds: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        for name, value in metrics.items():
            if name == "seconds" or name.startswith(("seconds/", "overlap/")):
                self._seconds.setdefault(name, []).append(value)

    def step(self) -> Pair:
        """Return the predicted and measured seconds of a step."""
        return {"predicted": self._plan.prediction.step_seconds, "measured": self._median("seconds")}

    def nodes(self) -> dict[str, Pair]:
        """Return the predicted and measured seconds of each node; ``copy`` stands for all weight syncs."""
        plan = self._plan
        syncs = {sync.node for sync in plan.workload.weight_syncs}
        predicted = {name: time.seconds for name, time in plan.prediction.nodes.items() if name not in syncs}
        if syncs:
            predicted[_COPY] = sum(plan.prediction.nodes[name].seconds for name in syncs)
        return {
            name: {"predicted": value, "measured": self._median(f"seconds/{name}")} for name, value in predicted.items()
        }

    def overlap(self) -> dict[str, dict[str, float | None]]:
        """Return the ages of tokens, and predicted and measured figures of generation ahead of training.

        Empty for synchronous steps. The first step, in which all wait, does not count.
        """
        ages = {name.removeprefix(_AGE): self._mean(name) for name in self._seconds if name.startswith(_AGE)}
        staleness = {age: share for age, share in ages.items() if age.isdecimal()}
        if not staleness:
            return {}
        predicted = self._plan.prediction.overlap
        measured = {"staleness": self._mean("overlap/staleness_mean")}
        measured |= {side: self._idle_share(side) for side in ("generate_idle", "train_idle")}
        return {"tokens_by_staleness": staleness} | {
            figure: {"predicted": getattr(predicted, figure) if predicted else None, "measured": value}
            for figure, value in measured.items()
        }

    def _idle_share(self, side: str) -> float:
        """Return the share of the time of all steps but the first in which one side waited.

        A wait at the end of a step is counted with the next one, so the second step has one of the first.
        """
        return sum(self._seconds[f"overlap/{side}_seconds"][2:]) / (sum(self._seconds["seconds"][1:]) or 1.0)

    def _mean(self, name: str) -> float | None:
        """Return the mean without the first step."""
        values = self._seconds.get(name, ())
        return fmean(values[1:] or values) if values else None

    def _median(self, name: str) -> float | None:
        """Return the median without the first step, which loads, compiles and allocates.

        Steps that are generated together count as one with their mean.
        """
        values, size = self._seconds.get(name, ()), self._plan.steps_per_turn
        means = [fmean(values[start : start + size]) for start in range(0, len(values), size)]
        if len(means) > 1 and len(values) % size:
            means.pop()
        return median(means[1:] or means) if means else None


def figures_per_gpu(plan: Plan, seconds: Mapping[str, float], total: float, tokens: int) -> dict[str, float]:
    """Return the throughput per GPU of a step, and how long the GPUs of each pool were idle.

    ``seconds`` has the time of each node and of the weight sync, ``total`` the time of the step, and ``tokens`` the
    tokens of prompts and responses. A pool's idle time is known only if every node runs in its own step.
    """
    figures = {"tokens_per_second_per_gpu": tokens / total / plan.prediction.num_gpus}
    if plan.workload.ahead is not None or not seconds:
        return figures
    roles = {task.node: task.role for task in plan.workload.tasks}
    for pool in plan.prediction.pools:
        busy = sum(time for node, time in seconds.items() if roles.get(node) in pool.roles)
        if any({sync.source, sync.target} & set(pool.roles) for sync in plan.workload.weight_syncs):
            busy += seconds[_COPY]
        figures[f"pools/{'-'.join(pool.roles)}/idle_seconds"] = max(0.0, total - busy)
    return figures


def compare_memory(plan: Plan, peaks: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, Pair]]:
    """Return the predicted and measured GiB of each process at the peak of each phase.

    ``peaks`` are the measured bytes.
    """
    predicted = plan.prediction.processes
    names = dict.fromkeys((*predicted, *peaks))
    return {
        name: {
            phase: {
                "predicted": sum(terms.values()) if (terms := predicted.get(name, {}).get(phase)) else None,
                "measured": peak / GIB if (peak := peaks.get(name, {}).get(phase)) else None,
            }
            for phase in dict.fromkeys((*predicted.get(name, ()), *peaks.get(name, ())))
        }
        for name in names
    }
