"""Rules about nodes and the edges between them: their options, unread outputs, groups and sources."""

from collections.abc import Mapping

from rlflow.batch import Metrics, Selection
from rlflow.compiler.graph import Graph, evaluation_nodes
from rlflow.engines.base import Sampling
from rlflow.errors import GraphError, below
from rlflow.nodes.base import GraphNode
from rlflow.recipe import Recipe


def check_options(recipe: Recipe, graph: Graph) -> None:
    """Have each node check its options."""
    for node in graph.nodes:
        with below(f"graph.{node.name}"):
            node.operation.check(frozenset(node.inputs))


def check_outputs_read(recipe: Recipe, graph: Graph) -> None:
    """Check that a node reads each output, apart from metrics and selections."""
    read = {origin for node in graph.nodes for origin in node.inputs.values()}
    if recipe.evaluation is not None and (pair := evaluation_nodes(graph)):
        read.add(pair[1].name)
    for node in graph.nodes:
        if node.name not in read and node.operation.output() not in (Metrics, Selection):
            raise GraphError(
                f"graph.{node.name}",
                f"no node reads its {node.operation.output().__name__}",
                fix="remove the node, or name it as an input of another",
            )


def check_sources(recipe: Recipe, graph: Graph) -> None:
    """Check that the rows of a run are pairs for all nodes, or for none."""
    unpaired = sorted(graph.sources - {"pairs"})
    if "pairs" in graph.sources and unpaired:
        reading = next(node for node in graph.nodes if unpaired[0] in node.inputs.values())
        fact = f"it reads {unpaired[0]}, and other nodes read pairs: the rows of a run can only be one of them"
        raise GraphError(f"graph.{reading.name}", fact, fix="two recipes, the second with models.NAME.recipe the first")


def check_groups(recipe: Recipe, graph: Graph) -> None:
    """Check that responses come in the groups in which nodes compare them, and with the options that inputs require."""
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.operation.compares_groups:
            _check_group_size(node, nodes)
        _check_required_options(node, nodes)


def _check_group_size(node: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    """Raise GraphError if all responses that the node reads, however indirectly, come in groups of one."""
    generators = _generators_before(node, nodes)
    if generators and all(generator.group_size == 1 for generator in generators.values()):
        path = f"graph.{next(iter(generators))}.group_size"
        fact = "compares the responses to a prompt, but group_size is 1"
        raise GraphError(f"graph.{node.name}", fact, fix=f"{path}=8, or any number from 2")


def _generators_before(node: GraphNode, nodes: Mapping[str, GraphNode]) -> dict[str, Sampling]:
    """Return how the responses are sampled that a node reads, directly or through other nodes, by their node."""
    generators: dict[str, Sampling] = {}
    for origin in (nodes[name] for name in node.inputs.values() if name in nodes):
        if (sampling := origin.operation.sampling) is not None:
            generators[origin.name] = sampling
        else:
            generators |= _generators_before(origin, nodes)
    return generators


def _check_required_options(node: GraphNode, nodes: Mapping[str, GraphNode]) -> None:
    """Raise GraphError if a node that is connected to an input lacks an option that the input requires."""
    for name, options in node.operation.required_options.items():
        origin = nodes.get(node.inputs.get(name, ""))
        for option, value in options.items() if origin else ():
            assert origin is not None
            path, actual = f"graph.{origin.name}.{option}", getattr(origin.operation, option, value)
            if actual != value:
                fact = f"is {actual}, but input '{name}' of graph.{node.name} requires {value}"
                kind = type(origin.operation)
                same_kind = [other for other in nodes.values() if isinstance(other.operation, kind)]
                fits = [other.name for other in same_kind if getattr(other.operation, option) == value]
                fix = f"graph.{node.name}.{name}={fits[0]}" if fits else f"{path}={value}"
                raise GraphError(path, fact, fix=fix)
