"""The scalar that a graph minimises, composed of what its nodes state."""

from collections import Counter
from collections.abc import Iterator, Mapping

from rlflow.compiler.graph import Graph
from rlflow.nodes.base import Formula, GraphNode


def loss_lines(graph: Graph) -> list[str]:
    """Return a line ``SYMBOL = EXPRESSION`` for each trained role's loss, and below it one for each symbol in it.

    A node that states no formula stands in the others by its name.
    """
    stated_symbols = {name: stated.symbol for name, stated in _stated(graph, {}).items()}
    used = Counter(stated_symbols.values())
    symbols = {name: symbol if used[symbol] == 1 else f"{symbol}_{name}" for name, symbol in stated_symbols.items()}
    formulas = _stated(graph, symbols)
    lines: dict[str, None] = {}
    for node in graph.nodes:
        if node.role in graph.trained_roles() and node.name in formulas and not _is_read(graph, node):
            lines[f"loss of {node.role} = {formulas[node.name].expression}"] = None
            for before in _upstream(graph, node):
                if before.name in formulas:
                    lines.update(dict.fromkeys(_lines(formulas[before.name], symbols[before.name], before is node)))
    return list(lines)


def _stated(graph: Graph, symbols: Mapping[str, str]) -> dict[str, Formula]:
    """Return each node's formula, where it has one, its inputs called by their ``symbols`` or else their names."""
    formulas = {
        node.name: node.operation.formula({name: symbols.get(origin, origin) for name, origin in node.inputs.items()})
        for node in graph.nodes
    }
    return {name: stated for name, stated in formulas.items() if stated is not None}


def _lines(stated: Formula, symbol: str, is_loss: bool) -> Iterator[str]:
    if not is_loss:
        yield f"{symbol} = {stated.expression}"
    yield from (f"{name} = {expression}" for name, expression in stated.where.items())


def _is_read(graph: Graph, node: GraphNode) -> bool:
    return any(node.name in other.inputs.values() for other in graph.nodes)


def _upstream(graph: Graph, node: GraphNode) -> Iterator[GraphNode]:
    """Yield the node and all that it is made of, the nearest first."""
    nodes, wanted = {other.name: other for other in graph.nodes}, [node.name]
    for name in wanted:
        yield nodes[name]
        wanted += [origin for origin in nodes[name].inputs.values() if origin in nodes and origin not in wanted]
