"""Rules by which a recipe learns and a run records: options that are valid alone, and together are of no use."""

from rlflow.compiler.graph import Graph
from rlflow.errors import GraphError, RecipeError
from rlflow.nodes.base import GraphNode, NodeView
from rlflow.recipe import Recipe, RunOptions


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


def check_run(recipe: Recipe, options: RunOptions) -> None:
    """Check the options of a run against its recipe. Raises RecipeError."""
    traced = () if isinstance(options.trace, bool) else options.trace
    for option, recorded in (("trace", traced), ("profile", options.profile)):
        if strays := [step for step in recorded if not 1 <= step <= recipe.steps]:
            fact = f"step {strays[0]} comes after the last step of the run, {recipe.steps}"
            if strays[0] < 1:
                fact = f"step {strays[0]} comes before the first step of a run, 1"
            raise RecipeError(option, fact, fix=f"steps from 1 to {recipe.steps}")
    if options.tune and recipe.overlap.max_staleness:
        fact = "compares the times of steps, which overlap.max_staleness lets overlap"
        raise RecipeError("tune", fact, fix="tune=false, or overlap.max_staleness=0")
