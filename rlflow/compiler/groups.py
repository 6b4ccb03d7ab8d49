"""Whether responses come in the groups, and the pairs, that nodes compare them in."""

from rlflow.compiler.graph import Graph
from rlflow.errors import GraphError
from rlflow.nodes.advantage import BatchAdvantage, GreedyAdvantage
from rlflow.nodes.generate import Generate


def check_groups(graph: Graph) -> None:
    """Raises GraphError where responses are compared with others to their prompt and there are none, for a greedy
    baseline that is not greedy, and for rows that are to be pairs and something else."""
    _check_pairs(graph)
    writing = {node.name: node.operation for node in graph.nodes if isinstance(node.operation, Generate)}
    for node in graph.nodes:
        read = [origin for origin in node.inputs.values() if origin in writing]
        compares = node.operation.unit == "group" or isinstance(node.operation, BatchAdvantage)
        if compares and read and all(writing[origin].group_size == 1 for origin in read):
            origin = read[0]
            fact = f"is 1, and graph.{node.name} compares the responses to a prompt with each other"
            raise GraphError(f"graph.{origin}.group_size", fact, fix="2 or more")
        if isinstance(node.operation, GreedyAdvantage):
            _check_greedy(node.name, node.inputs["greedy"], writing.get(node.inputs["greedy"]))


def _check_pairs(graph: Graph) -> None:
    others = sorted(graph.sources - {"pairs"})
    if "pairs" in graph.sources and others:
        reading = next(node for node in graph.nodes if others[0] in node.inputs.values())
        fact = f"it reads {others[0]}, and other nodes read pairs: a run's rows are one or the other"
        raise GraphError(f"graph.{reading.name}", fact, fix="two recipes, the second with models.NAME.recipe the first")


def _check_greedy(name: str, origin: str, writes: Generate | None) -> None:
    for option, value in {"temperature": 0, "group_size": 1}.items():
        if writes is not None and getattr(writes, option) != value:
            fact = f"is {getattr(writes, option)}, and graph.{name} takes the likeliest response as its baseline"
            raise GraphError(f"graph.{origin}.{option}", fact, fix=f"graph.{origin}.{option}={value}")
