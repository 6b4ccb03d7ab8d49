"""Evaluation on held-out rows: when it is due, and what it runs."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlflow.batch import Pairs, Rewards, Rollouts
from rlflow.compiler.graph import Graph, accuracy_node, evaluation_nodes
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.nodes.base import GraphNode
from rlflow.recipe.evaluation import Evaluation, mean_metric, metric_name, pass_metrics
from rlflow.runtime.checkpoint import RunProgress
from rlflow.runtime.graph_runner import GraphRunner
from rlflow.runtime.objects.store_usage import count_towards


class Evaluator(Protocol):
    """A measure of the trained model on held-out rows."""

    def run(self, data: DataSource) -> dict[str, float]:
        """Return the metrics by name; the first is the figure that stands for the evaluation."""


@dataclass(frozen=True)
class RewardEvaluator:
    """The graph's own generation and reward on the held-out prompts of each set."""

    runner: GraphRunner
    generators: Mapping[str, GraphNode]
    """The node that generates, as each set asks for its responses."""
    reward: GraphNode
    pass_reward: float

    def run(self, data: DataSource) -> dict[str, float]:
        """Return the mean reward of the responses that have one, and pass@k where prompts have several responses."""
        metrics = {}
        for name, generate in self.generators.items():
            prompts = data.held_out_prompts(name)
            with count_towards("evaluation"):
                rollouts: Rollouts = self._run(generate, prompts)
                rewards: Rewards = self._run(self.reward, rollouts)
            count = len(rewards) // len(prompts)
            metrics[metric_name(name, mean_metric(count))] = rewards.mean()
            if count > 1:
                passes = pass_metrics(rewards.values, rollouts.keys[:, 1], self.pass_reward)
                metrics |= {metric_name(name, metric): value for metric, value in passes.items()}
        return metrics

    def _run(self, node: GraphNode, batch: Any) -> Any:
        """Run a node whose inputs are all the same batch."""
        return self.runner.run_node(node, dict.fromkeys(node.inputs.values(), batch), in_evaluation=True)


@dataclass(frozen=True)
class PairEvaluator:
    """The graph's own nodes on held-out pairs, up to the update that says how many pairs it gets right."""

    runner: GraphRunner
    before: tuple[GraphNode, ...]
    update: GraphNode
    sets: tuple[str, ...]

    def run(self, data: DataSource) -> dict[str, float]:
        """Return the accuracy on each set."""
        return {metric_name(name, "accuracy"): self._accuracy(data.held_out_pairs(name)) for name in self.sets}

    def _accuracy(self, pairs: Pairs) -> float:
        edges: dict[str, Any] = {"pairs": pairs}
        with count_towards("evaluation"):
            for node in self.before:
                edges[node.name] = self.runner.run_node(node, edges, in_evaluation=True)
            inputs: Mapping[str, Any] = {name: edges[origin] for name, origin in self.update.inputs.items()}
            operation: Any = self.update.operation
            return float(operation.accuracy(self.runner.engines[str(self.update.role)], **inputs))


@dataclass(frozen=True)
class PausingEvaluator:
    """Another evaluator, for whose time nothing is generated ahead."""

    evaluator: Evaluator
    paused: Callable[[], AbstractContextManager[None]]
    """Pauses the generation, and gives its engines the newest weights."""

    def run(self, data: DataSource) -> dict[str, float]:
        """Return the metrics."""
        with self.paused():
            return self.evaluator.run(data)


def evaluator_of(graph: Graph, runner: GraphRunner, options: Evaluation, eval_split: str | None) -> Evaluator:
    """Return the evaluator of a graph, made of its own nodes."""
    sets = options.sets_with(eval_split)
    if graph.evaluation_metric == "accuracy" and (update := accuracy_node(graph)) is not None:
        return PairEvaluator(runner, graph.nodes[: graph.nodes.index(update)], update, tuple(sets))
    measured = evaluation_nodes(graph)
    assert measured is not None  # compiling has checked it
    generate, reward = measured
    operation: Any = generate.operation
    generators = {
        name: replace(
            generate,
            operation=operation.for_evaluation(
                options.responses_of(evaluation_set), options.temperature, options.top_p
            ),
        )
        for name, evaluation_set in sets.items()
    }
    return RewardEvaluator(runner, generators, reward, options.pass_reward)


def is_evaluation_due(plan: Plan, progress: RunProgress) -> bool:
    """Return whether an evaluation is due after the steps so far."""
    if plan.recipe.evaluation is None or str(progress.step) in progress.evaluations:
        return False
    return progress.step % plan.recipe.evaluation.every == 0 or progress.step == plan.recipe.steps
