"""Rules that all inputs of a node belong to the same responses, and old logprobs to the policy that generated them."""

from collections.abc import Mapping

from rlflow.batch import Advantages, Divergences, Logprobs, Pairs, Rewards, Sequences, ValueEstimates
from rlflow.compiler.graph import SOURCES, Graph
from rlflow.errors import GraphError
from rlflow.nodes.base import GraphNode
from rlflow.recipe import Recipe

_PER_RESPONSE = (Advantages, Divergences, Logprobs, Rewards, Sequences, ValueEstimates)


def check_responses(recipe: Recipe, graph: Graph) -> None:
    """Raise GraphError for a node that would combine numbers of different responses, or learn from others."""
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        other_inputs = node.operation.other_responses
        for part in (other_inputs, node.inputs.keys() - other_inputs):
            _check_same(node, [name for name in node.inputs if name in part], nodes)
        if old := nodes.get(node.inputs.get("old_logprobs", "")):
            updates = "Trains" in node.capabilities
            _check_old_logprobs(recipe, graph, node, old, [str(node.role)] if updates else graph.trained_roles())


def _check_same(node: GraphNode, inputs: list[str], nodes: Mapping[str, GraphNode]) -> None:
    """Check that these inputs come from one node that generates, or from the same rows of the data."""
    origins = {name: responses for name in inputs if (responses := _origins(node.inputs[name], nodes))}
    if not origins:
        return
    first = "rollouts" if "rollouts" in origins else next(iter(origins))
    for name, responses in origins.items():
        if responses.isdisjoint(origins[first]):
            mine, expected = (" and ".join(sorted(names)) for names in (responses, origins[first]))
            fact = f"belongs to the responses of {mine}, and input '{first}' to those of {expected}"
            fix = f"connect a node that reads {expected}"
            if not type(node.operation).__module__.startswith("rlflow."):
                fix += ", or name this input in other_responses of your node"
            raise GraphError(f"graph.{node.name}.{name}", fact, fix=fix)


def _origins(name: str, nodes: Mapping[str, GraphNode]) -> frozenset[str]:
    """Return the nodes or data whose responses the output of ``name`` has a row for; none for any other output."""
    output = nodes[name].operation.output() if name in nodes else SOURCES[name]
    if not issubclass(output, _PER_RESPONSE):
        return frozenset()
    # A node that makes pairs has rows of its own, as one that samples.
    if name not in nodes or nodes[name].operation.sampling or issubclass(output, Pairs):
        return frozenset({name})
    node = nodes[name]
    read = node.inputs.keys() - node.operation.other_responses
    return frozenset().union(*(_origins(node.inputs[key], nodes) for key in read)) or frozenset({name})


def _check_old_logprobs(recipe: Recipe, graph: Graph, node: GraphNode, old: GraphNode, trained: list[str]) -> None:
    """Check that the logprobs before the step are those of the role that is trained, or of one with its weights.

    A correction between the sampler and itself would always be 1.
    """
    role, path = old.role, f"graph.{old.name}"
    if role is None:
        return
    fix = f"{path}={{node: logprobs, role: {trained[0]}}}"
    if role not in trained and recipe.roles[role].follows not in trained:
        names = "' or '".join(trained)
        fact = f"graph.{node.name} needs the logprobs of '{names}' before the step, and '{role}' has other weights"
        raise GraphError(f"{path}.role", fact, fix=fix)
    if "ScoresBase" in old.capabilities:
        fact = f"gives logprobs without the adapters that '{role}' trains"
        raise GraphError(f"{path}.node", fact, fix=fix)
    sampler = next((origin for origin in graph.nodes if origin.name == node.inputs.get("rollouts")), None)
    is_own = sampler is not None and sampler.operation.sampling is not None and sampler.role == role
    if not is_own or not getattr(node.operation, "correction", None):
        return
    fact = f"is always 1: graph.{old.name} has the logprobs of '{role}', which also samples the responses"
    raise GraphError(f"graph.{node.name}.correction", fact, fix=fix)
