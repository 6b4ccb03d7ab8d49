"""Whether what writes responses gives nodes the groups that they compare within."""

from rlflow.compiler.graph import Graph
from rlflow.errors import GraphError
from rlflow.nodes.advantage import BatchAdvantage, GreedyAdvantage, GroupAdvantage, LeaveOneOutAdvantage
from rlflow.nodes.dynamic_sampling import DynamicSampling
from rlflow.nodes.generate import Generate

_COMPARING = (GroupAdvantage, LeaveOneOutAdvantage, BatchAdvantage, DynamicSampling)


def check_groups(graph: Graph) -> None:
    """Raises GraphError where responses are compared with others to their prompt and there are none, and for a greedy
    baseline that is not greedy."""
    writing = {node.name: node.operation for node in graph.nodes if isinstance(node.operation, Generate)}
    for node in graph.nodes:
        origin = node.inputs.get("rollouts", "")
        if isinstance(node.operation, _COMPARING) and origin in writing and writing[origin].group_size == 1:
            fact = f"is 1, and graph.{node.name} compares the responses to a prompt with each other"
            raise GraphError(f"graph.{origin}.group_size", fact, fix="2 or more")
        if isinstance(node.operation, GreedyAdvantage):
            _check_greedy(node.name, node.inputs["greedy"], writing.get(node.inputs["greedy"]))


def _check_greedy(name: str, origin: str, writes: Generate | None) -> None:
    for option, value in {"temperature": 0, "group_size": 1}.items():
        if writes is not None and getattr(writes, option) != value:
            fact = f"is {getattr(writes, option)}, and graph.{name} takes the likeliest response as its baseline"
            raise GraphError(f"graph.{origin}.{option}", fact, fix=f"graph.{origin}.{option}={value}")
