"""The graph of a plan as a drawing: the column and the row of each node, and the lines between them."""

from itertools import pairwise
from typing import Any

import networkx as nx

from rlflow.compiler.plan import Plan
from rlflow.report.formats import format_size


def draw_graph(plan: Plan) -> dict[str, Any]:
    """Return boxes and lines. A line passes through a place of its own in each column between its two boxes.

    What follows from other lines is left out of the drawing: a node that reads another one directly and through a third
    one has only the longer way. ``reads`` of a box has all that a node reads.
    """
    boxes = _boxes(plan)
    full = nx.DiGraph([(origin, name) for name, box in boxes.items() for origin in box["reads"]])
    full.add_nodes_from(boxes)
    columns = {name: column for column, names in enumerate(nx.topological_generations(full)) for name in names}
    chains: list[list[Any]] = []
    for origin, name in nx.transitive_reduction(full).edges:
        between = [(origin, name, column) for column in range(columns[origin] + 1, columns[name])]
        chains.append([origin, *between, name])
    places = {name: (column, 0.0) for name, column in columns.items()}
    places |= {place: (place[2], 0.0) for chain in chains for place in chain[1:-1]}
    before: dict[Any, list[Any]] = {place: [] for place in places}
    for chain in chains:
        for first, second in pairwise(chain):
            before[second].append(first)
    rows = 1
    for column in range(1 + max(columns.values())):
        inside = [place for place, (at, _) in places.items() if at == column]
        # Each place is next to the mean row of those that it comes from; among equals, lines pass below boxes.
        rows_before = {place: [places[origin][1] for origin in before[place]] for place in inside}
        mean = {place: sum(numbers) / max(1, len(numbers)) for place, numbers in rows_before.items()}
        for row, place in enumerate(sorted(inside, key=lambda place: (mean[place], isinstance(place, tuple)))):
            places[place] = (column, row)
        rows = max(rows, len(inside))
    return {
        "boxes": [box | dict(zip(("column", "row"), places[name], strict=True)) for name, box in boxes.items()],
        "lines": [[places[place] for place in chain] for chain in chains],
        "columns": 1 + max(columns.values()),
        "rows": rows,
    }


def _boxes(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the data, the nodes and the weight syncs, by name."""
    edges = plan.prediction.data.edges

    def box(name: str, kind: str, role: str | None, reads: list[str]) -> dict[str, Any]:
        size = edges.get(name)
        text = "" if size is None else format_size(size)
        return {"name": name, "kind": kind, "role": role, "reads": reads, "bytes": size, "size": text}

    boxes = {name: box(name, "data", None, []) for name in sorted(plan.graph.sources)}
    for node in plan.graph.nodes:
        boxes[node.name] = box(node.name, node.operation.kind, node.role, list(dict.fromkeys(node.inputs.values())))
    for sync in plan.workload.weight_syncs:
        trains = [node.name for node in plan.graph.nodes if node.role == sync.source and "Trains" in node.capabilities]
        boxes[sync.node] = box(sync.node, "weights", sync.target, trains)
    return boxes
