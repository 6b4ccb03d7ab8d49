"""Efficiencies from finished runs: the figures with which the planner would have predicted what a run measured.

The planner's own formulas are fitted, so that nothing is modelled twice. A figure that a run says little about stays
near its earlier value.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.compiler.lower import lower
from rlflow.compiler.plan import Plan, read_plan
from rlflow.errors import RecipeError
from rlflow.resources.cluster import Cluster
from rlflow.resources.demand import Demand
from rlflow.resources.memory.processes import LOCAL_PROCESS
from rlflow.resources.planner.hosts import select_hosts
from rlflow.resources.planner.prediction.task_times import task_seconds, turn_seconds, weight_sync_seconds
from rlflow.resources.time.calibration import (
    Calibration,
    calibration_figures,
    calibration_from,
    default_efficiency,
    engine_key,
)
from rlflow.resources.time.speed import Efficiency, Speed
from rlflow.resources.workload import Task

# The figures that a measured node says something about, and the factor by which each may be expected to change.
_SHARES = {"matmul": 2.0, "memory": 2.0, "elementwise": 2.0}
_TIMES = {"call_s": 10.0, "pass_sample_s": 10.0}
_IN_PASSES = _SHARES | _TIMES | {"train_layer_s": 10.0}
_IN_GENERATION = _SHARES | _TIMES | {"decode_layer_s": 10.0, "decode_step_s": 10.0, "decode_sequence_s": 10.0}
# The fit works on logarithms, so times that are zero by default start at these values.
_UNMEASURED = {"call_s": 2e-3, "pass_sample_s": 5e-5}
# The smallest value of a figure, and the time that is added to every node: a node that takes less says little.
_LEAST_S, _SMALL_S = 1e-6, 2e-3
# The share by which measured nodes differ from run to run.
_NOISE = 0.05
_ROUNDS = 40


@dataclass(frozen=True)
class MeasuredNode:
    """The measured time of a node, and the planner's formula for it."""

    engine: str
    """The engine; empty for a node without a role."""
    names: tuple[str, ...]
    """The figures that the time depends on."""
    predict: Callable[[Efficiency], float]
    seconds: float


def fit_efficiency(nodes: Sequence[MeasuredNode], start: Efficiency) -> Efficiency:
    """Return the efficiency that predicts ``nodes`` best without leaving ``start`` for no reason.

    Levenberg's method on logarithms, since times of all sizes count the same.
    """
    expected = _IN_PASSES | _IN_GENERATION | {"sync_s": 10.0, "host_sample_s": 10.0}
    names = sorted({name for node in nodes for name in node.names})
    if not names:
        return start
    first = np.log([getattr(start, name) or _UNMEASURED.get(name, _LEAST_S) for name in names])
    spread = np.log([expected[name] for name in names])
    highest = np.array([0.0 if name in _SHARES else np.inf for name in names])

    def at(point: NDArray[np.float64]) -> Efficiency:
        return replace(start, **{name: float(value) for name, value in zip(names, np.exp(point), strict=True)})

    def misses(point: NDArray[np.float64]) -> NDArray[np.float64]:
        efficiency = at(point)
        errors = [np.log((node.predict(efficiency) + _SMALL_S) / (node.seconds + _SMALL_S)) for node in nodes]
        return np.concatenate([np.array(errors) / _NOISE, (point - first) / spread])

    point, damping = np.minimum(first, highest), 1.0
    current = misses(point)
    for _ in range(_ROUNDS):
        slopes = np.stack([(misses(point + step) - current) / 1e-4 for step in 1e-4 * np.eye(len(names))], axis=1)
        gradient = slopes.T @ current
        # A share that is one already stays there if the gradient would increase it.
        free = (point < highest) | (gradient > 0)
        normal = slopes[:, free].T @ slopes[:, free]
        change = np.zeros(len(names))
        change[free] = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient[free])
        tried = np.minimum(point + np.clip(change, -2, 2), highest)
        after = misses(tried)
        if after @ after < current @ current:
            point, current, damping = tried, after, damping / 3
        else:
            damping *= 4
    return at(point)


def read_run(folder: Path) -> tuple[Plan, Mapping[str, Any]]:
    """Return the plan and the report of a run. Raises RecipeError for a folder without a report that has times."""
    plan = read_plan(folder / "plan.json")
    try:
        report = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError):
        report = {}
    if not _has_times(report):
        raise RecipeError(
            "calibration",
            f"the run in '{folder}' has no report with measured times",
            fix="the folder of a run that ended after at least one step",
        )
    return plan, report


def _has_times(report: Any) -> bool:
    """Return whether a report has times of nodes, and all its times and memory are pairs of numbers or null."""
    if not isinstance(report, dict) or not report.get("nodes"):
        return False
    memory = report.get("memory", {})
    tables = [report["nodes"], *(memory.values() if isinstance(memory, dict) else [memory])]
    return all(isinstance(table, dict) and all(map(_is_pair, table.values())) for table in tables)


def _is_pair(value: Any) -> bool:
    if not isinstance(value, dict) or not {"predicted", "measured"} <= value.keys():
        return False
    figures = [figure for name, figure in value.items() if name in ("predicted", "measured") and figure is not None]
    return all(isinstance(figure, int | float) and 0 <= figure < math.inf for figure in figures)


def calibration_of_run(folder: Path, cluster: Cluster) -> Calibration:
    """Return what the run in ``folder`` measured, for a plan on ``cluster``; other figures stay as they were for it.

    Raises RecipeError for a folder without a report, and for a run on other kinds of GPU.
    """
    plan, report = read_run(folder)
    return calibration_from(calibration_figures(calibration_from_runs([(plan, report)], plan.calibration)), cluster)


def calibration_from_runs(runs: Sequence[tuple[Plan, Mapping[str, Any]]], start: Calibration) -> Calibration:
    """Return ``start`` with what the runs measured: times of nodes, and memory of processes."""
    calibration = dict(start)
    kinds = {host.gpu: plan.cluster.gpus[host.gpu] for plan, _ in runs for host in plan.cluster.hosts}
    for kind, gpu in sorted(kinds.items()):
        base = start.get(kind) or default_efficiency(gpu)
        of_kind = [run for run in runs if any(host.gpu == kind for host in run[0].cluster.hosts)]
        nodes = [node for plan, report in of_kind for node in measured_nodes(plan, report, start)]
        calibration[kind] = fit_efficiency([node for node in nodes if not node.engine], base)
        for engine in sorted({role.engine for plan, _ in of_kind for role in plan.recipe.roles.values()}):
            before = start.get(engine_key(kind, engine), base)
            fitted = fit_efficiency([node for node in nodes if node.engine == engine], before)
            differences = [gib for plan, report in of_kind for gib in _unexplained_gib(plan, report, engine)]
            if differences:
                fitted = replace(fitted, process_gib=max(0.0, fitted.process_gib + median(differences)))
            calibration[engine_key(kind, engine)] = fitted
    return calibration


def measured_nodes(plan: Plan, report: Mapping[str, Any], calibration: Calibration) -> list[MeasuredNode]:
    """Return the nodes of a run that have both a formula and a measured time."""
    measured = {name: pair["measured"] for name, pair in report["nodes"].items() if pair["measured"]}
    demands = {demand.role: demand for demand in lower(plan.recipe, plan.graph).demands}
    nodes = []
    for task in plan.workload.tasks:
        if task.node not in measured or task.streams:
            continue
        if task.role is None:
            nodes.append(MeasuredNode("", ("host_sample_s",), _host_formula(plan, task), measured[task.node]))
        elif demands[task.role].architecture is not None:
            names = tuple(_IN_GENERATION if task.kind == "generate" else _IN_PASSES)
            predict = _formula(plan, demands[task.role], task, _speed(plan, task.role, calibration))
            nodes.append(MeasuredNode(demands[task.role].engine, names, predict, measured[task.node]))
    if len(plan.workload.weight_syncs) == 1 and "copy" in measured:
        [sync] = plan.workload.weight_syncs
        source, target = demands[sync.source], demands[sync.target]
        source_gpus, target_gpus = (plan.roles[role].layout.num_gpus for role in (sync.source, sync.target))
        same = set(plan.roles[sync.source].bundles) == set(plan.roles[sync.target].bundles)
        speed = _speed(plan, sync.target, calibration)

        def predict_sync(efficiency: Efficiency) -> float:
            return weight_sync_seconds(
                source, target, source_gpus, target_gpus, _with(speed, efficiency), same_gpus=same
            )

        nodes.append(MeasuredNode(target.engine, ("sync_s",), predict_sync, measured["copy"]))
    return nodes


def _host_formula(plan: Plan, task: Task) -> Callable[[Efficiency], float]:
    """Return the formula of a task on CPUs. Hosts that are simulated on one machine share them."""
    on_cpus = plan.prediction.headroom_gib is None
    workers = plan.roles[task.hosts_of].workers if task.hosts_of and not on_cpus else ()
    num_hosts = len({worker.bundles[0].host for worker in workers}) or 1
    return lambda efficiency: task.samples / num_hosts * efficiency.host_sample_s


def _formula(plan: Plan, demand: Demand, task: Task, speed: Speed) -> Callable[[Efficiency], float]:
    layout = plan.roles[demand.role].layout
    sequences = plan.prediction.memory[demand.role].sequences
    kv_tokens = float("inf") if sequences is None else sequences * task.typical_length

    memory, is_first = plan.prediction.memory[demand.role], task is plan.workload.of(demand.role)[0]
    takes_turns = is_first and "resting" in memory.phases and not layout.stays

    def predict(efficiency: Efficiency) -> float:
        seconds = task_seconds(demand, [task], layout, _with(speed, efficiency), kv_tokens=kv_tokens)[task.node]
        turn = turn_seconds(demand, layout, memory.phases[memory.phase], efficiency) if takes_turns else 0.0
        return seconds + turn

    return predict


def _speed(plan: Plan, role: str, calibration: Calibration) -> Speed:
    label = plan.recipe.roles[role].label
    return select_hosts(plan.cluster, [label] if label else [], calibration).speed


def _with(speed: Speed, efficiency: Efficiency) -> Speed:
    return replace(speed, efficiency=efficiency, engines=())


def _unexplained_gib(plan: Plan, report: Mapping[str, Any], engine: str) -> list[float]:
    """Return by how much each phase of each process with this engine held more on a CPU than was predicted."""
    names = {name for name, role in plan.recipe.roles.items() if role.engine == engine}
    if plan.prediction.headroom_gib is not None or not names:
        return []
    return [
        pair["measured"] - pair["predicted"]
        for process, phases in report.get("memory", {}).items()
        if process.partition("/")[0] in names or process == LOCAL_PROCESS
        for pair in phases.values()
        if pair["measured"] and pair["predicted"]
    ]
