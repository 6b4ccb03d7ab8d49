"""Warnings about the options of a recipe's nodes, shown before the run."""

from collections.abc import Iterator

from rlflow.compiler.graph import Graph, GraphNode
from rlflow.compiler.rounds import in_rounds
from rlflow.nodes.base import Setting
from rlflow.nodes.generate import Generate
from rlflow.recipe import Recipe


def cautions(recipe: Recipe, graph: Graph) -> Iterator[str]:
    """Yield a line for each: what the nodes say of themselves, and what the step's rounds are planned for."""
    for node in graph.nodes:
        for line in node.operation.cautions(_setting(recipe, graph, node)):
            yield f"graph.{node.name}.{line}"
    if rounds := in_rounds(graph):
        yield (
            f"graph.{rounds[-1].name}: responses are planned for {recipe.expect.rounds:g} x the prompts that are "
            "trained on (expect.rounds)"
        )


def _setting(recipe: Recipe, graph: Graph, node: GraphNode) -> Setting:
    role = recipe.roles[node.role] if node.role else None
    read = [each for each in graph.nodes if each.name in node.inputs.values() and isinstance(each.operation, Generate)]
    return Setting(
        connected=frozenset(node.inputs),
        role=node.role,
        engine=role.engine if role else None,
        dtype=recipe.models[role.model].dtype if role else None,
        samplers=tuple(recipe.roles[each.role].engine for each in read if each.role),
    )
