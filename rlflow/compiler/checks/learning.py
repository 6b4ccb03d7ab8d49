"""Rules by which a recipe learns: options that are valid one by one, and together leave nothing to learn."""

from rlflow.compiler.graph import Graph
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.base import GraphNode, NodeView
from rlflow.recipe import Recipe


def check_learning(recipe: Recipe, graph: Graph) -> None:
    """Have each node check the graph around it, and check its minibatches and its reference."""
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        view = NodeView(node=node, nodes=nodes, recipe=recipe)
        node.operation.check_graph(view)
        _check_minibatches(view)
        if (reference := view.origin("reference")) is not None:
            _check_reference(recipe, graph, reference)


def _check_minibatches(view: NodeView) -> None:
    """Raise GraphError for a node that divides a step among more optimizer steps than it has samples."""
    minibatches = getattr(view.node.operation, "num_minibatches", 1)
    sizes = [node.operation.sampling.group_size for node in view.generators() if node.operation.sampling]
    samples = view.recipe.data.batch_size * (sum(sizes) or 1)
    if minibatches > samples:
        fact = f"{minibatches} minibatches are more than the {samples} samples of a step"
        raise GraphError(f"{view.path}.num_minibatches", fact, fix=f"use {samples} or fewer")


def _check_reference(recipe: Recipe, graph: Graph, reference: GraphNode) -> None:
    """Raise RecipeError or GraphError for a reference that changes with the policy, so that they never differ."""
    role = str(reference.role)
    if "Scores" not in reference.capabilities:
        return
    if (trained := recipe.roles[role].follows) is not None:
        fact = f"the reference would get the weights of '{trained}' after every step, so that they never differ"
        raise RecipeError(f"roles.{role}.follows", fact, fix=f"roles.{role}.follows=null")
    if role in graph.trained_roles():
        fact = f"the role '{role}' is trained, so it cannot be its own reference"
        fix = "a role of its own with the same model; with adapters, node: base_logprobs"
        raise GraphError(f"graph.{reference.name}.role", fact, fix=fix)
