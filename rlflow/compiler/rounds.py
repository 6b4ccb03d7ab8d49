"""What a step does in rounds: a dynamic_sampling node and all that it is made of."""

from rlflow.compiler.graph import Graph, GraphNode
from rlflow.errors import GraphError
from rlflow.nodes.dynamic_sampling import DynamicSampling
from rlflow.nodes.generate import Generate


def in_rounds(graph: Graph) -> tuple[GraphNode, ...]:
    """In their order, that node the last. None of a graph without one."""
    last = next((node for node in graph.nodes if isinstance(node.operation, DynamicSampling)), None)
    wanted = {last.name} if last else set()
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted.update(node.inputs.values())
    return tuple(sorted((node for node in graph.nodes if node.name in wanted), key=lambda node: node is last))


def after_rounds(graph: Graph) -> Graph:
    """The other nodes."""
    names = {node.name for node in in_rounds(graph)}
    return Graph(nodes=tuple(node for node in graph.nodes if node.name not in names))


def check_rounds(graph: Graph) -> None:
    """Raises GraphError for what cannot be done in rounds."""
    sampling = [node.name for node in graph.nodes if isinstance(node.operation, DynamicSampling)]
    if not sampling:
        return
    path = f"graph.{sampling[0]}"
    if len(sampling) > 1:
        raise GraphError(path, f"{' and '.join(sampling)} would each choose the prompts of a step", fix="leave one")
    for node in graph.nodes:
        if "examples" in node.inputs.values():
            raise GraphError(f"graph.{node.name}", f"it reads all examples of a step, and {path} chooses prompts")
        if isinstance(node.operation, Generate) and node.operation.overcommit:
            fact = f"prompts are begun before their step, and {path} chooses them in it"
            raise GraphError(f"graph.{node.name}.overcommit", fact, fix=f"graph.{node.name}.overcommit=0")
