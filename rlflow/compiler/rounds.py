"""What a step does in rounds: a dynamic_sampling node and all that it is made of."""

from rlflow.compiler.graph import SOURCES, Graph, GraphNode
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.dynamic_sampling import DynamicSampling
from rlflow.nodes.generate import Generate
from rlflow.recipe import Recipe


def in_rounds(graph: Graph) -> tuple[GraphNode, ...]:
    """In their order, that node the last. None of a graph without one."""
    wanted = {node.name for node in graph.nodes if isinstance(node.operation, DynamicSampling)}
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted.update(node.inputs.values())
    return tuple(node for node in graph.nodes if node.name in wanted)


def after_rounds(graph: Graph) -> Graph:
    """The other nodes."""
    names = {node.name for node in in_rounds(graph)}
    return Graph(nodes=tuple(node for node in graph.nodes if node.name not in names))


def check_rounds(recipe: Recipe, graph: Graph) -> None:
    """Raises GraphError for what cannot be done in rounds, RecipeError where some are expected and there are none."""
    sampling = [node.name for node in graph.nodes if isinstance(node.operation, DynamicSampling)]
    if not sampling:
        if recipe.expect.rounds != 1:
            raise RecipeError("expect.rounds", "no node 'dynamic_sampling' asks for more prompts", fix="leave it out")
        return
    path = f"graph.{sampling[0]}"
    if len(sampling) > 1:
        raise GraphError(path, f"{' and '.join(sampling)} would each choose the prompts of a step", fix="leave one")
    for node in graph.nodes:
        for source in SOURCES.keys() & node.inputs.values():
            if source != "prompts":
                raise GraphError(f"graph.{node.name}", f"it reads all {source} of a step, and {path} chooses prompts")
        if node in in_rounds(graph) and getattr(node.operation, "kl_target", None) is not None:
            fact = f"a coefficient is the same for all of a step, and {path} makes this node run several times in one"
            raise GraphError(f"graph.{node.name}.kl_target", fact, fix=f"graph.{node.name}.kl_target=null")
        if isinstance(node.operation, Generate) and node.operation.overcommit:
            fact = f"prompts are begun before their step, and {path} chooses them in it"
            raise GraphError(f"graph.{node.name}.overcommit", fact, fix=f"graph.{node.name}.overcommit=0")
