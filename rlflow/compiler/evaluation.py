"""Chooses the measure on held-out rows from what the graph reads, whatever classes its nodes have."""

from typing import TYPE_CHECKING

from rlflow.batch import Rewards
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.generate import Generate
from rlflow.recipe import Recipe

if TYPE_CHECKING:
    from rlflow.compiler.graph import Graph, GraphNode


def judged(graph: "Graph") -> "tuple[GraphNode, GraphNode] | None":
    """Return a node that generates, and the one whose rewards for its responses are the figure.

    That is a node which reads nothing but the responses; a function goes before a model.
    """
    generators = {node.name: node for node in graph.nodes if isinstance(node.operation, Generate)}
    judges = [node for node in graph.nodes if issubclass(node.operation.output(), Rewards)]
    for node in sorted(judges, key=lambda each: each.role is not None):
        origins = set(node.inputs.values())
        if len(origins) == 1 and origins <= generators.keys():
            return generators[origins.pop()], node
    return None


def comparing(graph: "Graph") -> "GraphNode | None":
    """Return the first trained node that reads pairs and says how many of them it gets right."""
    trains = (node for node in graph.nodes if "pairs" in node.inputs.values() and node.role in graph.trained_roles())
    return next((node for node in trains if callable(getattr(node.operation, "accuracy", None))), None)


def check_evaluation(recipe: Recipe, graph: "Graph") -> None:
    """Raise GraphError where nothing in the graph can be measured on held-out rows, and RecipeError without a split."""
    if recipe.evaluation is None:
        return
    if graph.evaluated == "reward" and judged(graph) is None:
        fact = "needs a node that generates, and one that reads its responses alone and gives Rewards"
        raise GraphError("evaluation", fact, fix="add rewards: {node: reward}, or evaluation=null")
    if graph.evaluated == "accuracy" and comparing(graph) is None:
        fact = "no node that trains on pairs has a method 'accuracy', the share of pairs that it gets right"
        raise GraphError(
            "evaluation", fact, fix="derive it from rlflow.nodes.preference.Preference, or evaluation=null"
        )
    if recipe.data.eval_split is None:
        raise RecipeError(
            "data.eval_split", "is missing, and evaluation needs it", fix="name a split, or evaluation=null"
        )
