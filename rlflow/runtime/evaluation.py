"""Evaluation on held-out rows: when it is due, and what it runs."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlflow.batch import Pairs, Rewards, Rollouts
from rlflow.compiler.graph import Graph, GraphNode, accuracy_node, evaluation_nodes
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.recipe.evaluation import Evaluation, mean_metric, metric_name, pass_metrics
from rlflow.runtime.checkpoint import RunProgress
from rlflow.runtime.objects.budget import edge
from rlflow.runtime.protocols import Engines
from rlflow.runtime.step import run_node


class Evaluator(Protocol):
    """A measure of the trained model on held-out rows."""

    def run(self, engines: Engines, data: DataSource) -> dict[str, float]:
        """Return the metrics by name; the first is the figure that stands for the evaluation."""


@dataclass(frozen=True)
class RewardEvaluator:
    """The graph's own generation and reward on the held-out prompts of each set."""

    generators: Mapping[str, GraphNode]
    """The node that generates, as each set asks for its responses."""
    reward: GraphNode
    pass_reward: float

    def run(self, engines: Engines, data: DataSource) -> dict[str, float]:
        """Return the mean reward of the responses that have one, and pass@k where prompts have several responses."""
        metrics = {}
        for name, generate in self.generators.items():
            prompts = data.held_out_prompts(name)
            with edge("evaluation"):
                rollouts: Rollouts = _run(generate, engines, dict.fromkeys(generate.inputs.values(), prompts))
                rewards: Rewards = _run(self.reward, engines, dict.fromkeys(self.reward.inputs.values(), rollouts))
            count = len(rewards) // len(prompts)
            metrics[metric_name(name, mean_metric(count))] = rewards.mean()
            if count > 1:
                passes = pass_metrics(rewards.values, rollouts.keys[:, 1], self.pass_reward)
                metrics |= {metric_name(name, metric): value for metric, value in passes.items()}
        return metrics


@dataclass(frozen=True)
class PairEvaluator:
    """The graph's own nodes on held-out pairs, up to the update that says how many pairs it gets right."""

    before: tuple[GraphNode, ...]
    update: GraphNode
    sets: tuple[str, ...]

    def run(self, engines: Engines, data: DataSource) -> dict[str, float]:
        """Return the accuracy on each set."""
        return {metric_name(name, "accuracy"): self._accuracy(engines, data.held_out_pairs(name)) for name in self.sets}

    def _accuracy(self, engines: Engines, pairs: Pairs) -> float:
        edges: dict[str, Any] = {"pairs": pairs}
        with edge("evaluation"):
            for node in self.before:
                edges[node.name] = _run(node, engines, edges)
            inputs: Mapping[str, Any] = {name: edges[origin] for name, origin in self.update.inputs.items()}
            operation: Any = self.update.operation
            return float(operation.accuracy(engines[str(self.update.role)], **inputs))


@dataclass(frozen=True)
class PausingEvaluator:
    """Another evaluator, for whose time nothing is generated ahead."""

    evaluator: Evaluator
    paused: Callable[[], AbstractContextManager[None]]
    """Pauses the generation, and gives its engines the newest weights."""

    def run(self, engines: Engines, data: DataSource) -> dict[str, float]:
        """Return the metrics."""
        with self.paused():
            return self.evaluator.run(engines, data)


def evaluator_of(planned: Graph, running: Graph, options: Evaluation, eval_split: str | None) -> Evaluator:
    """Return the evaluator of the ``planned`` graph, made of the nodes of the same graph as it runs."""
    nodes = {node.name: node for node in running.nodes}
    sets = options.sets_with(eval_split)
    if planned.evaluation_metric == "accuracy" and (update := accuracy_node(planned)) is not None:
        before = planned.nodes[: planned.nodes.index(update)]
        return PairEvaluator(tuple(nodes[node.name] for node in before), update, tuple(sets))
    measured = evaluation_nodes(planned)
    assert measured is not None  # compiling has checked it
    generate, reward = (nodes[node.name] for node in measured)
    operation: Any = generate.operation
    generators = {
        name: replace(
            generate, operation=operation.for_evaluation(options.responses_of(each), options.temperature, options.top_p)
        )
        for name, each in sets.items()
    }
    return RewardEvaluator(generators, reward, options.pass_reward)


def is_evaluation_due(plan: Plan, progress: RunProgress) -> bool:
    """Return whether an evaluation is due after the steps so far."""
    if plan.recipe.evaluation is None or str(progress.step) in progress.evaluations:
        return False
    return progress.step % plan.recipe.evaluation.every == 0 or progress.step == plan.recipe.steps


def _run(node: GraphNode, engines: Engines, edges: Mapping[str, Any]) -> Any:
    return run_node(node, engines, edges, in_evaluation=True)
