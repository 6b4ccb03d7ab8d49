"""The plan as text for a person, on one screen: verdict, placement, memory, timeline, reasons and alternatives."""

from collections.abc import Mapping
from itertools import groupby, zip_longest

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.compiler.graph import SOURCES
from rlflow.compiler.plan import Plan
from rlflow.nodes.base import GraphNode
from rlflow.recipe import Role
from rlflow.report.console import WIDTH
from rlflow.report.formats import format_seconds
from rlflow.report.formula import loss_lines
from rlflow.report.plan_facts import facts
from rlflow.resources.layout import Layout
from rlflow.resources.memory.processes import largest_process
from rlflow.resources.planner.confidence import Verdict

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
# The most hosts, and GPUs of a host, that are drawn; larger clusters are described in words.
_HOSTS = 4
_GPUS = 8
_BAR = 64
# Memory terms below this are summed up as "other".
_SMALL_GIB = 0.95


def render(plan: Plan, *, explain: bool = False, width: int = WIDTH) -> RenderableType:
    """Return the plan for a console of ``width`` columns, at least 60.

    ``explain`` adds the graph, all alternatives and all limits.
    """
    colours = {role: _COLOURS[index % len(_COLOURS)] for index, role in enumerate(plan.roles)}
    parts: list[RenderableType] = [_verdict(plan), Text()]
    if explain:
        parts += [_graph(plan, colours), Text(), _loss(plan, width), Text()]
    parts += [_placement(plan, colours, width), Text(), _roles(plan, colours, width), Text()]
    parts += [_timeline(plan, colours, width), Text(), facts(plan, width, explain=explain)]
    return Group(*parts)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _verdict(plan: Plan) -> Text:
    prediction = plan.prediction
    verdict = (prediction.verdict or "PLACED", "bold green" if prediction.verdict is Verdict.FITS else "bold yellow")
    text = Text.assemble((plan.recipe.name, "bold"), f" on {plan.cluster.shape}   ", verdict)
    low, high = prediction.step_seconds_range
    between = f"{format_seconds(low).removesuffix(' s')} to {format_seconds(high)}"
    text.append(f", {format_seconds(prediction.step_seconds)}/step ({between}),")
    text.append(f" {prediction.tokens_per_second_per_gpu:.0f} tokens/s/{plan.unit}")
    used = {bundle for placement in plan.roles.values() for bundle in placement.bundles}
    text.append(f"\n{len(used)} of {sum(len(host.usable) for host in plan.cluster.hosts)} ")
    if prediction.headroom_gib is None:
        # Hosts of CPUs are simulated on this machine where a plan uses several.
        simulated = " on simulated hosts" if len(used) > 1 else ""
        gib, process = largest_process(prediction.processes)
        return text.append(f"CPUs{simulated}" + (f", largest process {gib:.1f} GiB ({process})" if process else ""))
    return text.append(f"GPUs, least headroom {prediction.headroom_gib:.1f} GiB ({prediction.fullest})")


def _graph(plan: Plan, colours: Mapping[str, str]) -> Table:
    table = _table("node", "kind", "reads", "gives", "role")
    for column in table.columns:
        column.no_wrap = column.header != "reads"
    for node in plan.graph.nodes:
        table.add_row(
            node.name, node.operation.kind, _reads(node), node.operation.output().__name__, _role(node, colours)
        )
    for sync in plan.workload.weight_syncs:
        table.add_row(sync.node, "weights", sync.source, "weights", Text(sync.target, colours[sync.target]))
    return table


def _loss(plan: Plan, width: int) -> Table:
    """Return the scalar that the run minimises, with the recipe's numbers."""
    table = Table(box=None, pad_edge=False, show_header=False, width=width)
    table.add_column(overflow="fold")
    for line in loss_lines(plan.graph):
        table.add_row(Text(line, "bold" if line.startswith("loss of ") else ""))
    return table


def _reads(node: GraphNode) -> str:
    return ", ".join(f"{origin} (data)" if origin in SOURCES else origin for origin in node.inputs.values())


def _role(node: GraphNode, colours: Mapping[str, str]) -> Text:
    return Text(node.role, colours[node.role]) if node.role else Text("-", "dim")


def _placement(plan: Plan, colours: Mapping[str, str], width: int) -> RenderableType:
    """Draw each host with a line for each role: a cell is a GPU with the number of its worker.

    A worker of several GPUs is one block.
    """
    hosts = plan.cluster.hosts
    widest = max(host.gpus for host in hosts)
    if widest > _GPUS:
        return _placement_in_words(plan, colours)
    workers: dict[str, dict[tuple[str, int], int]] = {
        role: {(bundle.host, bundle.gpu): n for n, worker in enumerate(placement.workers) for bundle in worker.bundles}
        for role, placement in plan.roles.items()
    }
    names = max(len(name) for name in (*plan.roles, "reserved")) + 2
    host_column = min(24, max(len(host.name) for host in hosts[:_HOSTS])) + 2
    cell = min(10, (width - names - host_column) // widest)
    lines = [
        Text(" " * (host_column + names) + "".join(str(gpu).ljust(cell) for gpu in range(widest)).rstrip(), "bold")
    ]
    for host in hosts[:_HOSTS]:
        at_host = {role: [at.get((host.name, gpu)) for gpu in range(host.gpus)] for role, at in workers.items()}
        empty = "reserved" if host.reserved else "unused"
        present = [role for role, numbers in at_host.items() if any(number is not None for number in numbers)]
        for label, role in zip_longest([host.name[: host_column - 2]], present or [empty], fillvalue=""):
            line = Text(label.ljust(host_column))
            line.append(role.ljust(names), colours.get(role, "dim"))
            for number, run in groupby(at_host.get(role, [])):
                block = "-" if number is None else str(number)
                length = len(list(run)) * cell
                block = (block + " ").ljust(length - 2, "=") if number is not None and length > cell else block
                line.append(block.ljust(length), "dim" if number is None else colours[role])
            line.rstrip()
            lines.append(line)
    if len(hosts) > _HOSTS:
        lines.append(Text(f"and {len(hosts) - _HOSTS} more hosts; plan.json lists all", "dim"))
    return Group(*lines)


def _placement_in_words(plan: Plan, colours: Mapping[str, str]) -> Table:
    table = _table("role", "GPUs")
    for role, placement in plan.roles.items():
        by_host: dict[str, int] = {}
        for bundle in placement.bundles:
            by_host[bundle.host] = by_host.get(bundle.host, 0) + 1
        shown = [f"{host}: {count}" for host, count in list(by_host.items())[:_HOSTS]]
        shown += [f"and {len(by_host) - _HOSTS} more hosts"] if len(by_host) > _HOSTS else []
        table.add_row(Text(role, colours[role]), ", ".join(shown))
    return table


def _roles(plan: Plan, colours: Mapping[str, str], width: int) -> Table:
    """Describe each role: its engine and layout, how full its fullest GPU gets, and what fills it."""
    table = Table(box=None, pad_edge=False, show_header=False, width=width)
    table.add_column(width=max(len(role) for role in plan.roles))
    table.add_column(overflow="fold", ratio=1)
    sizes = {host.name: plan.cluster.memory_gib(host) for host in plan.cluster.hosts}
    engines = max(len(plan.recipe.roles[role].engine) for role in plan.roles) + 2
    for role, placement in plan.roles.items():
        options = plan.recipe.roles[role]
        words = options.engine.ljust(engines) + describe_layout(placement.layout)
        table.add_row(Text(role, colours[role]), words + _adapters(options) + _pinned_attention(options))
        memory = plan.prediction.memory[role]
        peaks = [(max(gpus.values()), sizes[host] or 0.0) for host, gpus in memory.peak_gib.items()]
        peak, size = min(peaks, key=lambda pair: pair[1] - pair[0], default=(0.0, 0.0))
        if peak:
            terms = _terms(memory.phases[memory.phase], peak, memory.sequences)
            table.add_row("", f"{_bar(peak, size)} GiB in {memory.phase}: {terms}")
    return table


def _adapters(role: Role) -> str:
    return f", lora {role.lora.rank}" if role.lora is not None else ""


def _pinned_attention(role: Role) -> str:
    """Name the attention kernel if it is pinned; ``auto`` is decided where the role runs."""
    return f", {role.attention}" if role.attention != "auto" else ""


def _terms(terms: Mapping[str, float], peak: float, sequences: int | None) -> str:
    large = {term: gib for term, gib in terms.items() if gib >= _SMALL_GIB}
    small = sum(terms.values()) - sum(large.values())
    words = [f"{term} {gib:.0f}" for term, gib in large.items()]
    words += [f"other {small:.0f}"] if small >= 0.5 else []
    words += [f"idle roles {idle:.0f}"] if (idle := peak - sum(terms.values())) >= 0.5 else []
    return ", ".join(words) + (f" ({sequences} sequences)" if sequences else "")


def _bar(used: float, size: float) -> str:
    filled = round(10 * min(1.0, used / size))
    return f"|{'#' * filled}{'-' * (10 - filled)}| {used:.0f} of {size:.0f}"


def describe_layout(layout: Layout) -> str:
    """Return the layout in words, without degrees of 1."""
    degrees = (
        ("dp", layout.data_parallel_size),
        ("tp", layout.tensor_parallel_size),
        ("pp", layout.pipeline_parallel_size),
        ("sp", layout.sequence_parallel_size),
        ("ep", layout.expert_parallel_size),
    )
    words = [f"{name} {size}" for name, size in degrees if size > 1] or ["1 worker"]
    words += [f"{layout.hosts_per_engine} hosts each"] * (layout.hosts_per_engine > 1)
    if layout.num_replicas is not None:
        words.append("sharded" if layout.zero_stage else "whole")
        words += [f"{layout.num_replicas} replicas"] * (layout.num_replicas > 1)
    elif layout.zero_stage is not None:
        words.append(f"zero {layout.zero_stage}")
    if layout.offload not in (None, "none"):
        words.append(f"offload {layout.offload}")
    if layout.gpu_memory_utilization is not None:
        words.append(f"util {layout.gpu_memory_utilization:g}")
    else:
        patches = f" and {layout.micro_batch_patches} patches" if layout.micro_batch_patches else ""
        words.append(f"{layout.micro_batch_tokens} tokens{patches}")
    if layout.gradient_checkpointing:
        words.append(f"checkpointing all but {layout.kept_layers} layers" if layout.kept_layers else "checkpointing")
    if layout.eager is not None:
        words.append("eager" if layout.eager else "graphs")
    if layout.sleeps:
        words.append("sleeps")
    return ", ".join(words)


def _timeline(plan: Plan, colours: Mapping[str, str], width: int) -> RenderableType:
    """Draw when each node runs: ``=`` on the critical path of the step, ``-`` elsewhere."""
    prediction = plan.prediction
    step = prediction.step_seconds or 1.0
    roles = {node.name: node.role for node in plan.graph.nodes} | {
        sync.node: sync.target for sync in plan.workload.weight_syncs
    }
    names = max(12, *(len(node) + 2 for node in prediction.nodes)) if prediction.nodes else 12
    bar = min(_BAR, width - 12 - names)
    lines = []
    for node, time in prediction.nodes.items():
        role = roles.get(node)
        if role is None and time.seconds < 0.01 * step:
            continue
        first = min(bar - 1, round(bar * time.start / step))
        length = max(1, min(bar - first, round(bar * time.seconds / step)))
        line = Text(f"{node:<{names}}")
        line.append(" " * first)
        line.append(("=" if time.critical else "-") * length, colours.get(role or "", "dim"))
        line.append(" " * (bar - first - length) + f"  {format_seconds(time.seconds):>8}")
        lines.append(line)
    return Group(*lines)
