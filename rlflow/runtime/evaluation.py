"""Evaluation on held-out rows: when it is due, and what it runs."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlflow.batch import Rewards
from rlflow.compiler.graph import Graph, GraphNode, accuracy_node, evaluation_nodes
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.runtime.checkpoint import RunProgress
from rlflow.runtime.objects.budget import edge
from rlflow.runtime.protocols import Engines
from rlflow.runtime.step import run_node


class Evaluator(Protocol):
    """A measure of the trained model on held-out rows."""

    def run(self, engines: Engines, data: DataSource) -> float:
        """Return the measure."""


@dataclass(frozen=True)
class RewardEvaluator:
    """The graph's own generation and reward on held-out prompts, with the likeliest tokens."""

    generate: GraphNode
    reward: GraphNode

    def run(self, engines: Engines, data: DataSource) -> float:
        """Return the mean reward of the held-out prompts that have one."""
        prompts = data.held_out_prompts()
        with edge("evaluation"):
            rollouts = _run(self.generate, engines, dict.fromkeys(self.generate.inputs.values(), prompts))
            rewards: Rewards = _run(self.reward, engines, dict.fromkeys(self.reward.inputs.values(), rollouts))
        return rewards.mean()


@dataclass(frozen=True)
class PairEvaluator:
    """The graph's own nodes on held-out pairs, up to the update that says how many pairs it gets right."""

    before: tuple[GraphNode, ...]
    update: GraphNode

    def run(self, engines: Engines, data: DataSource) -> float:
        """Return the accuracy."""
        edges: dict[str, Any] = {"pairs": data.held_out_pairs()}
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

    def run(self, engines: Engines, data: DataSource) -> float:
        """Return the measure."""
        with self.paused():
            return self.evaluator.run(engines, data)


def evaluator_of(planned: Graph, running: Graph) -> Evaluator:
    """Return the evaluator of the ``planned`` graph, made of the nodes of the same graph as it runs."""
    nodes = {node.name: node for node in running.nodes}
    if planned.evaluation_metric == "accuracy" and (update := accuracy_node(planned)) is not None:
        before = planned.nodes[: planned.nodes.index(update)]
        return PairEvaluator(tuple(nodes[node.name] for node in before), update)
    measured = evaluation_nodes(planned)
    assert measured is not None  # compiling has checked it
    generate, reward = (nodes[node.name] for node in measured)
    operation: Any = generate.operation
    return RewardEvaluator(replace(generate, operation=operation.greedy()), reward)


def is_evaluation_due(plan: Plan, progress: RunProgress) -> bool:
    """Return whether an evaluation is due after the steps so far."""
    if plan.recipe.evaluation is None or str(progress.step) in progress.evaluations:
        return False
    return progress.step % plan.recipe.evaluation.every == 0 or progress.step == plan.recipe.steps


def _run(node: GraphNode, engines: Engines, edges: Mapping[str, Any]) -> Any:
    return run_node(node, engines, edges, in_evaluation=True)
