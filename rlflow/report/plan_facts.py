"""The facts below the picture of a plan: its cost, risks, reasons, limits, warnings and alternatives."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from rlflow.compiler.models import routing_bytes
from rlflow.compiler.plan import Plan, format_duration
from rlflow.compiler.problem import Problem
from rlflow.compiler.what_if import cost_of_pins, gain_of_overlap, largest_sizes
from rlflow.report.formats import PRICE_UNIT, format_gpu_hours, format_seconds, format_size
from rlflow.resources.layout import GIB
from rlflow.resources.planner.confidence import Verdict

_ALTERNATIVES = 3
_LABEL = 12


def facts(plan: Plan, width: int, *, explain: bool) -> Table:
    """List reasons, limits, warnings and alternatives; ``explain`` shows all, and the largest sizes that fit."""
    prediction = plan.prediction
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", width=_LABEL)
    table.add_column(overflow="fold", width=width - _LABEL - 2)
    table.add_row("run", _run(plan))
    for risk in prediction.risks:
        table.add_row("tight", Text(risk, "yellow"))
    for index, change in enumerate(prediction.safer_with):
        table.add_row("" if index else "safer with", change)
    for reason in prediction.reasons:
        table.add_row("why", reason)
    for line in describe_sharing(plan):
        table.add_row("GPU memory", line)
    if line := describe_host_memory(plan):
        table.add_row("host memory", line)
    table.add_row("data", describe_data(plan))
    for line in describe_routing(plan):
        table.add_row("routing", line)
    for label, line in _answers(plan) if explain else ():
        table.add_row(label, line)
    for limit in prediction.limits[: None if explain else 1]:
        table.add_row("limit", limit)
    for warning in prediction.warnings:
        table.add_row("warning", Text(warning, "yellow"))
    for index, line in enumerate(_alternatives(plan, explain=explain)):
        table.add_row("" if index else "alternatives", line)
    table.add_row("fingerprint", Text(plan.fingerprint, "dim"))
    return table


def _answers(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the speeds of nodes, and answers that need more planning."""
    for node, time in plan.prediction.nodes.items():
        if time.mfu is not None:
            yield "speed", f"{node}: MFU {time.mfu:.0%}"
        if time.token_seconds is not None:
            yield "speed", f"{node}: {1000 * time.token_seconds:.3g} ms for each token of a response"
        if time.cpu_cores is not None:
            yield "speed", f"{node}: agents keep up to {max(time.cpu_cores.values()):.2g} CPU cores of a host busy"
    problem = Problem(plan.recipe, plan.graph, plan.cluster, plan.calibration)
    if plan.prediction.verdict is Verdict.FITS:
        for index, size in enumerate(largest_sizes(problem)):
            yield "" if index else "largest", size
    if pins := cost_of_pins(problem):
        yield "pins", pins
    if gain := gain_of_overlap(problem):
        yield "overlap", gain


def _run(plan: Plan) -> str:
    """Return how long all steps take, and what they cost."""
    cost = plan.cost
    low, high = (format_duration(3600 * hours) for hours in cost.hours_range)
    low = low.removesuffix(f" {high.split()[1]}")
    steps = f"{plan.recipe.steps} step{'s' if plan.recipe.steps > 1 else ''}"
    text = f"{steps} in {format_duration(3600 * cost.hours)} ({low} to {high})"
    if plan.prediction.verdict is not None:
        text += f", {format_gpu_hours(cost.gpu_hours)} GPU-hours"
    return text if cost.price is None else f"{text}, price {cost.price:.2f} {PRICE_UNIT}"


def describe_sharing(plan: Plan) -> list[str]:
    """Describe whether roles that share GPUs keep their memory there; return nothing on CPUs."""
    lines = []
    for pool in plan.prediction.pools if plan.prediction.verdict is not None else ():
        if len(pool.roles) > 1:
            stays = all(plan.roles[role].layout.stays for role in pool.roles)
            lines.append(f"{' + '.join(pool.roles)} {'stay side by side' if stays else 'take turns'}")
    return lines


def describe_host_memory(plan: Plan) -> str:
    """Return the memory of the host that needs most; empty below 1 GiB."""
    host, gib = max(plan.prediction.host_gib.items(), key=lambda need: need[1], default=("", 0.0))
    return f"{gib:.0f} GiB on {host}, for offloaded and sleeping roles and for data" if gib >= 1 else ""


def describe_data(plan: Plan) -> str:
    """Return how much data travels between nodes in a step, and the largest peak of an object store."""
    data = plan.prediction.data
    largest = max(data.edges, key=lambda edge: data.edges[edge])
    fullest = max(data.store_peak_gib, key=lambda host: data.store_peak_gib[host])
    moved = f"{format_size(sum(data.edges.values()))} per step ({largest} {format_size(data.edges[largest])})"
    return f"{moved}, object store peak {format_size(data.store_peak_gib[fullest] * GIB)} ({fullest})"


def describe_routing(plan: Plan) -> Iterator[str]:
    """Yield which roles train with the experts of their samplers."""
    for name, role in plan.recipe.roles.items():
        if role.follows and (size := routing_bytes(plan.recipe, plan.graph, name)):
            yield f"{role.follows} replays the experts that {name} used, {size} B for each token"


def _alternatives(plan: Plan, *, explain: bool) -> Iterator[str]:
    alternatives = plan.prediction.alternatives
    shown = alternatives if explain else alternatives[:_ALTERNATIVES]
    for other in shown:
        if other.step_seconds is None:
            yield f"{other.what}: does not fit ({other.loses})"
        else:
            yield f"{other.what}: {format_seconds(other.step_seconds)} ({other.loses})"
    if more := len(alternatives) - len(shown):
        yield f"{more} more with explain=true"
