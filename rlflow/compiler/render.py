"""The plan as a person sees it: the graph, the placement with one row a host and one cell a GPU, the roles."""

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.compiler.graph import SOURCES, GraphNode
from rlflow.compiler.lower import architecture_of
from rlflow.compiler.plan import Plan
from rlflow.resources.planner import RolePlacement

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def render(plan: Plan) -> RenderableType:
    """For a console of 100 columns."""
    colours = {role: _COLOURS[index % len(_COLOURS)] for index, role in enumerate(plan.roles)}
    used = {bundle for placement in plan.roles.values() for worker in placement.workers for bundle in worker.bundles}
    total = sum(host.gpus for host in plan.cluster.hosts)
    unit = "GPUs" if any(gpu.memory_gib for gpu in plan.cluster.gpus.values()) else "processors"
    title = Text.assemble((plan.recipe.name, "bold"), f" on {plan.cluster.shape}: {len(used)} of {total} {unit} in use")
    title.append(f"   fingerprint {plan.fingerprint}", "dim")
    parts: list[RenderableType] = [
        title,
        Text(),
        _graph(plan, colours),
        Text(),
        _placement(plan, colours),
        Text(),
        _roles(plan, colours),
    ]
    return Group(*parts)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _graph(plan: Plan, colours: Mapping[str, str]) -> Table:
    table = _table("node", "kind", "reads", "gives", "role")
    for node in plan.graph.nodes:
        table.add_row(
            node.name, node.operation.kind, _reads(node), node.operation.output().__name__, _role(node, colours)
        )
    for copy in plan.copies:
        table.add_row("(weights)", "copy", copy.source, "weights", Text(copy.target, colours[copy.target]))
    return table


def _reads(node: GraphNode) -> str:
    return ", ".join(f"{origin} (data)" if origin in SOURCES else origin for origin in node.inputs.values())


def _role(node: GraphNode, colours: Mapping[str, str]) -> Text:
    return Text(node.role, colours[node.role]) if node.role else Text("-", "dim")


def _placement(plan: Plan, colours: Mapping[str, str]) -> Table:
    """A row a host, a cell a GPU: in the line of each role the number of its worker there."""
    workers: dict[str, dict[tuple[str, int], int]] = {
        role: {(bundle.host, bundle.gpu): n for n, worker in enumerate(placement.workers) for bundle in worker.bundles}
        for role, placement in plan.roles.items()
    }
    widest = max(host.gpus for host in plan.cluster.hosts)
    table = _table("host", "gpu", *(str(gpu) for gpu in range(widest)))
    for host in plan.cluster.hosts:
        places = [(host.name, gpu) for gpu in range(host.gpus)]
        here = [role for role, at in workers.items() if any(place in at for place in places)]
        labels = Text("\n").join(Text(role, colours[role]) for role in here)
        cells = [
            Text("\n").join(Text(str(workers[role].get(place, "-")), colours[role]) for role in here)
            for place in places
        ]
        table.add_row(host.name, labels or Text("(unused)", "dim"), *cells)
    return table


def _roles(plan: Plan, colours: Mapping[str, str]) -> Table:
    table = _table("role", "model", "engine", "layout")
    for role, placement in plan.roles.items():
        written = plan.recipe.roles[role]
        architecture = architecture_of(plan.recipe.models[written.model])
        size = f" {_billions(architecture.num_parameters)}" if architecture else ""
        table.add_row(Text(role, colours[role]), written.model + size, written.engine, _layout(placement))
    return table


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _layout(placement: RolePlacement) -> str:
    layout = placement.layout
    degrees = (
        ("dp", layout.data_parallel_size),
        ("tp", layout.tensor_parallel_size),
        ("pp", layout.pipeline_parallel_size),
        ("sp", layout.sequence_parallel_size),
    )
    words = [f"{name} {size}" for name, size in degrees if size > 1] or ["1 worker"]
    if layout.zero_stage is not None:
        words.append(f"zero {layout.zero_stage}")
    if layout.offload not in (None, "none"):
        words.append(f"offload {layout.offload}")
    words.append(f"{layout.micro_batch_tokens} tokens")
    if layout.gradient_checkpointing:
        words.append("checkpointing")
    if layout.gpu_memory_utilization is not None:
        words.append(f"util {layout.gpu_memory_utilization:g}")
    return ", ".join(words)
