"""The figures behind the sliders of a plan's page."""

from dataclasses import asdict
from typing import Any

from rlflow.compiler.other_sizes import SizePoint, size_axes, size_points
from rlflow.compiler.plan import Plan
from rlflow.report.formats import format_range

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
