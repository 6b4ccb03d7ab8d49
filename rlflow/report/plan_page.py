"""The plan as a page: one HTML file that needs nothing else, to look at and to send to others."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.compiler.facts import format_gpu_hours, format_seconds
from rlflow.compiler.graph import GraphNode
from rlflow.compiler.plan import Plan, format_duration
from rlflow.compiler.render import describe_layout
from rlflow.recipe_loading import to_yaml
from rlflow.report.page import build_page
from rlflow.text_files import replace_text


def write_page(plan: Plan, directory: Path) -> None:
    """Write ``plan.html``."""
    replace_text(directory / "plan.html", plan_page(plan))


def plan_page(plan: Plan) -> str:
    """Return the page. It loads nothing, and its own script draws the figures that ``page_figures`` returns."""
    return build_page("plan_page.html", page_figures(plan))


def page_figures(plan: Plan) -> dict[str, Any]:
    """Return what the page shows: the figures of ``plan.json`` as they are, and words where it has none."""
    prediction, cost = plan.prediction, plan.cost
    low, high = prediction.step_seconds_range
    unit = "CPU" if prediction.headroom_gib is None else "GPU"
    return {
        "name": plan.recipe.name,
        "cluster": plan.cluster.shape,
        "fingerprint": plan.fingerprint,
        "verdict": prediction.verdict,
        "summary": {
            "step": f"{format_seconds(prediction.step_seconds)} ({format_seconds(low)} to {format_seconds(high)})",
            f"{plan.recipe.steps} steps": format_duration(3600 * cost.hours),
            f"tokens/s per {unit}": f"{prediction.tokens_per_second_per_gpu:.0f}",
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
            {"name": name, "role": _role_of(plan, name), "time": format_seconds(time.seconds), **asdict(time)}
            for name, time in prediction.nodes.items()
        ],
        "step_seconds": prediction.step_seconds,
        "remarks": {
            "why": list(prediction.reasons),
            "tight": list(prediction.risks),
            "safer with": list(prediction.safer_with),
            "limit": list(prediction.limits),
            "warning": list(prediction.warnings),
        },
        "alternatives": [
            {"time": "does not fit" if each.step_seconds is None else format_seconds(each.step_seconds), **asdict(each)}
            for each in prediction.alternatives
        ],
        "recipe": to_yaml(plan.recipe),
    }


def _gpu_figures(plan: Plan) -> dict[str, str]:
    cost, prediction = plan.cost, plan.prediction
    figures = {
        "GPU-hours": format_gpu_hours(cost.gpu_hours),
        "least headroom": f"{prediction.headroom_gib:.1f} GiB ({prediction.fullest})",
    }
    return figures if cost.price is None else {**figures, "price": f"{cost.price:.2f}"}


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
        "sequences": memory.sequences,
    }


def _role_of(plan: Plan, node: str) -> str | None:
    """Return the role that runs a node; for a weight sync the one that gets the weights."""
    nodes: dict[str, GraphNode] = {each.name: each for each in plan.graph.nodes}
    if node in nodes:
        return nodes[node].role
    return next((sync.target for sync in plan.workload.copies if sync.node == node), None)
