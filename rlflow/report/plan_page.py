"""The plan as a page with sliders: one HTML file that needs nothing else, to look at and to send to others."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.compiler.models import training_memory
from rlflow.compiler.other_sizes import SizePoint, size_axes, size_points
from rlflow.compiler.plan import Plan, format_duration, write_plan
from rlflow.errors import RecipeError
from rlflow.nodes.base import GraphNode
from rlflow.recipe.load import to_yaml
from rlflow.report.formats import PRICE_UNIT, format_gpu_hours, format_range, format_time
from rlflow.report.graph_drawing import draw_graph
from rlflow.report.page import build_page
from rlflow.report.plan_facts import describe_data, describe_host_memory, describe_sharing
from rlflow.report.plan_text import describe_layout
from rlflow.resources.planner.confidence import MEMORY_BANDS, kind_of
from rlflow.runtime.checkpoint import checkpoints
from rlflow.system.folder_lock import locked
from rlflow.system.text_files import replace_text

PAGE = "plan.html"
"""The name of the page in the folder of a dry run."""


def write_dry_run(plan: Plan, directory: Path) -> None:
    """Write the plan and its page. Raises RecipeError if the folder holds a run, whose plan must stay."""
    with locked(directory):
        if checkpoints(directory):
            raise RecipeError("hydra.run.dir", f"'{directory}' holds a run", fix="another folder")
        write_plan(plan, directory)
        replace_text(directory / PAGE, plan_page(plan))


def plan_page(plan: Plan) -> str:
    """Return the page. It loads nothing, and its own script draws the figures that ``page_figures`` returns."""
    return build_page("plan_page.html", page_figures(plan))


def page_figures(plan: Plan) -> dict[str, Any]:
    """Return what the page shows: the figures of ``plan.json`` as they are, and words where it has none."""
    prediction, cost = plan.prediction, plan.cost
    pool_of = {role: index for index, pool in enumerate(prediction.pools) for role in pool.roles}
    return {
        "name": plan.recipe.name,
        "cluster": plan.cluster.shape,
        "fingerprint": plan.fingerprint,
        "verdict": prediction.verdict,
        "summary": {
            "step": format_range(prediction.step_seconds, prediction.step_seconds_range),
            f"{plan.recipe.steps} steps": format_duration(3600 * cost.hours),
            f"tokens/s per {plan.unit}": f"{prediction.tokens_per_second_per_gpu:.0f}",
            **({} if prediction.headroom_gib is None else _gpu_figures(plan)),
        },
        "hosts": [
            {
                "name": host.name,
                "kind": host.gpu,
                "reserved": host.reserved,
                "usable": list(host.usable),
                "gpus": host.gpus,
                "memory_gib": plan.cluster.memory_gib(host),
            }
            for host in plan.cluster.hosts
        ],
        "roles": {role: _role(plan, role) for role in plan.roles},
        "pools": [asdict(pool) for pool in prediction.pools],
        "nodes": [
            {
                "name": name,
                "role": (role := _role_of(plan, name)),
                "pool": None if role is None else pool_of[role],
                "time": format_time(time.seconds),
                **asdict(time),
            }
            for name, time in prediction.nodes.items()
        ],
        "graph": draw_graph(plan),
        "unit": plan.unit,
        "gpu_gib": min((gib for host in plan.cluster.hosts if (gib := plan.cluster.memory_gib(host))), default=None),
        "sizes": size_figures(plan),
        "step_seconds": prediction.step_seconds,
        "remarks": {
            "why": list(prediction.reasons),
            "tight": list(prediction.risks),
            "safer with": list(prediction.safer_with),
            "GPU memory": describe_sharing(plan),
            "host memory": [line] if (line := describe_host_memory(plan)) else [],
            "data": [describe_data(plan)],
            "limit": list(prediction.limits),
            "warning": list(prediction.warnings),
        },
        "alternatives": [
            {"time": "does not fit" if other.step_seconds is None else format_time(other.step_seconds), **asdict(other)}
            for other in prediction.alternatives
        ],
        "recipe": to_yaml(plan.recipe),
    }


def _gpu_figures(plan: Plan) -> dict[str, str]:
    cost, prediction = plan.cost, plan.prediction
    figures = {
        "GPU-hours": format_gpu_hours(cost.gpu_hours),
        "least headroom": f"{prediction.headroom_gib:.1f} GiB ({prediction.fullest})",
    }
    return figures if cost.price is None else {**figures, f"price, {PRICE_UNIT}": f"{cost.price:.2f}"}


def _role(plan: Plan, role: str) -> dict[str, Any]:
    """Return a role's layout in words, the worker on each GPU of each host, and its memory."""
    placement, memory = plan.roles[role], plan.prediction.memory[role]
    workers: dict[str, dict[int, int]] = {}
    for number, worker in enumerate(placement.workers):
        for bundle in worker.bundles:
            workers.setdefault(bundle.host, {})[bundle.gpu] = number
    return {
        "engine": plan.recipe.roles[role].engine,
        "layout": describe_layout(placement.layout),
        "workers": workers,
        "phase": memory.phase,
        "phases": memory.phases,
        "peak_gib": memory.peak_gib,
        "band_gib": _band(plan, role),
        "sequences": memory.sequences,
    }


def _band(plan: Plan, role: str) -> tuple[float, float] | None:
    """Return the range of the role's memory on its fullest GPU; None for an engine, which takes what it is given."""
    memory, recipe = plan.prediction.memory[role], plan.recipe
    peaks = [gib for gpus in memory.peak_gib.values() for gib in gpus.values()]
    if not peaks or memory.phase == "generate":
        return None
    training = training_memory(recipe.roles[role], recipe.models[recipe.roles[role].model])
    band = MEMORY_BANDS[kind_of(plan.roles[role].layout, training)]
    return band.low * max(peaks), band.high * max(peaks)


def _role_of(plan: Plan, node: str) -> str | None:
    """Return the role that runs a node; for a weight sync the one that gets the weights."""
    nodes: dict[str, GraphNode] = {planned.name: planned for planned in plan.graph.nodes}
    if node in nodes:
        return nodes[node].role
    return next((sync.target for sync in plan.workload.weight_syncs if sync.node == node), None)


# The names of the sizes for readers, by the last part of their paths.
_SIZES = {
    "max_tokens": "Longest response, tokens",
    "batch_size": "Batch, rows of the data in a step",
    "group_size": "Group, responses to a prompt",
}


def size_figures(plan: Plan) -> dict[str, Any]:
    """Return the sizes that can be changed, and what the planner predicts for each combination."""
    axes = size_axes(plan)
    points = list(size_points(plan, axes))
    planned = tuple(axis.values[axis.own] for axis in axes)
    labels = [{"label": _SIZES[axis.key.rpartition(".")[2]], **asdict(axis)} for axis in axes]
    shown = [_size_point(plan, point) for point in points]
    return {"axes": labels, "points": shown, "own": next(point for point in shown if point["sizes"] == planned)}


def _size_point(plan: Plan, point: SizePoint) -> dict[str, Any]:
    """Return one combination of sizes in words, with the memory of each role in figures."""
    if point.step_seconds is None or point.step_seconds_range is None:
        return {"sizes": point.sizes, "summary": {"verdict": "DOES NOT FIT"}, "reason": point.reason, "peak_gib": {}}
    change = point.step_seconds / plan.prediction.step_seconds - 1 if plan.prediction.step_seconds else 0.0
    summary = {
        **({"verdict": point.verdict} if point.verdict else {}),
        "step": format_range(point.step_seconds, point.step_seconds_range),
        "against this plan": f"{change:+.0%}",
        f"tokens/s per {plan.unit}": f"{point.tokens_per_second_per_gpu:.0f}",
    }
    figures = {"step_seconds": point.step_seconds, "peak_gib": point.peak_gib or {}}
    return {"sizes": point.sizes, "summary": summary, "reason": point.reason, **figures}
