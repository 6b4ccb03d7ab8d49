"""Warnings about recipes that are legal and yet probably not what is wanted."""

from collections.abc import Iterator

from rlflow.compiler.checks.data import data_sources
from rlflow.compiler.graph import Graph, resampled_nodes
from rlflow.compiler.models import model_architecture
from rlflow.engines.registry import engine_kind
from rlflow.nodes.base import NodeView
from rlflow.recipe import Recipe


def graph_warnings(recipe: Recipe, graph: Graph) -> Iterator[str]:
    """Yield the warnings of nodes about their options, and those about rounds, data, warm-ups and models."""
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        for line in node.operation.cautions(NodeView(node=node, nodes=nodes, recipe=recipe)):
            yield f"graph.{node.name}.{line}"
    if resampled := resampled_nodes(graph):
        yield (
            f"graph.{resampled[-1].name}: the plan expects responses for {recipe.expect.rounds:g} x the prompts that "
            "are trained on (expect.rounds)"
        )
    architectures = [model_architecture(model) for model in recipe.models.values()]
    if not recipe.expect.image_tokens and any(model and model.vision for model in architectures):
        yield "expect.image_tokens: a model can see images, for which the plan counts no time"
    for path, source, _, options in data_sources(recipe):
        if options and ":" not in source:  # a recipe may inherit them
            yield f"{path}.options: only functions have options, so '{source}' does not read them"
    for name, role in recipe.roles.items():
        # The schedule of a policy begins after the steps that train the critic alone.
        steps = max(0, recipe.steps - graph.critic_warmup(name))
        if role.optimizer and (warmup := role.optimizer.warmup_steps) > steps:
            path, rate = f"roles.{name}.optimizer.warmup_steps", role.optimizer.learning_rate_at(steps - 1, steps)
            yield f"{path}: the run ends after {steps} of {warmup} steps of warm-up, at a learning rate of {rate:.2g}"
        model = recipe.models[role.model].architecture
        if model is not None and not engine_kind(role.engine).concurrent:
            kinds = ["a sliding window"] * bool(model.num_windowed_layers) + ["a recurrence"] * bool(model.recurrent)
            if kinds:
                layers = f"layers with {' and '.join(kinds)}"
                yield f"roles.{name}: the plan holds, but '{role.engine}' refuses models that have {layers}"
