"""Every rollout that has a reward must get an advantage.

One pass over the graph.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import (
    Advantages,
    Conversations,
    Divergences,
    GaeAdvantages,
    Metrics,
    Rewards,
    RolloutAdvantages,
    Rollouts,
    SummedRewards,
    describe_samples,
)
from rlflow.compiler.graph import Graph, GraphNode, evaluation_nodes
from rlflow.data.source import DataSource
from rlflow.errors import EngineError, UserError, below
from rlflow.resources.time.lengths import QUANTILES
from rlflow.runtime.generation.partial_results import Streaming
from rlflow.runtime.objects.budget import edge
from rlflow.runtime.protocols import Engines


def check_advantages(node: str, output: Any, inputs: Mapping[str, Any]) -> None:
    """Raise EngineError for advantages that are not finite although nothing explains it.

    A rollout without a reward has no advantage on purpose, and may take the other rollouts of its prompt with it. The
    same holds for a conversation that failed and for a response without tokens of the model's own.
    """
    rollouts = next((each for each in inputs.values() if isinstance(each, Rollouts)), None)
    if not isinstance(output, Advantages) or rollouts is None or output.is_included.all():
        return
    excluded = _prompts_without_reward(inputs)
    missing = np.flatnonzero(~output.is_included)
    infinite = (
        set(np.flatnonzero(np.isinf(output.values.run_values))) if isinstance(output, RolloutAdvantages) else set()
    )
    bad = [row for row in missing if row in infinite or tuple(rollouts.keys[row, :2]) not in excluded]
    if bad:
        raise EngineError(
            f"node {node}: the advantage is not finite for {len(bad)} of {len(rollouts)} samples that have a reward "
            f"({describe_samples(rollouts.keys[bad])}). A division by the others of a group of one, or by a standard "
            "deviation of zero, gives that."
        )


def _prompts_without_reward(inputs: Mapping[str, Any]) -> set[tuple[int, ...]]:
    """Return step and prompt of all rollouts that lack a reward, failed, or have no tokens of the model's own."""
    rollouts = [each for each in inputs.values() if isinstance(each, Rollouts)]
    found: set[tuple[int, ...]] = set()
    for written in rollouts:
        lacks = written.failed | (written.own_lengths == 0)
        for rewards in inputs.values():
            if isinstance(rewards, Rewards) and len(rewards) == len(written):
                lacks = lacks | np.isnan(rewards.values)
        found.update(map(tuple, written.keys[lacks, :2]))
    return found


def run_graph(
    graph: Graph, engines: Engines, edges: dict[str, Any], made: Callable[[str, Any], None] = lambda name, output: None
) -> dict[str, float]:
    """The seconds that each node has worked. ``edges`` are the data's of this step; the nodes' come to them.

    What can be worked on while the rest of it is being written is. Until weights are copied, a role works no more after
    its last node in the graph.

    Each edge is taken out of ``edges`` when its last reader has run, and ``made`` is told each output when it is there:
    who holds on to one holds its columns.
    """
    seconds: dict[str, float] = {}
    readers = {origin: node.name for node in graph.nodes for origin in node.inputs.values()}
    last = {node.role: node.name for node in graph.nodes}
    for role in engines.keys() - last.keys():
        engines.done_until_copied(role)
    streams: dict[str, Streaming] = {}
    with ExitStack() as running:
        for node in graph.nodes:
            if node.name in streams:
                output, seconds[node.name] = streams.pop(node.name).output(node, edges)
            else:
                began = time.perf_counter()
                with ExitStack() as heard:
                    if following := graph.streaming_consumers(node):
                        stream = Streaming(node, following, partial(_run_on, engines))
                        streams |= dict.fromkeys((each.name for each in following), running.enter_context(stream))
                        heard.enter_context(engines.heard_by(stream, str(node.role)))
                    output = run_node(node, engines, edges)
                seconds[node.name] = time.perf_counter() - began
            if node.role is not None and last[node.role] == node.name:
                engines.done_until_copied(node.role)
            made(node.name, output)
            edges[node.name] = output
            del output
            for name in [name for name in edges if readers.get(name, node.name) == node.name]:
                del edges[name]
    return seconds


def _run_on(engines: Engines, node: GraphNode, edges: Mapping[str, Any]) -> Any:
    return run_node(node, engines, edges)


def run_node(node: GraphNode, engines: Engines, edges: Mapping[str, Any]) -> Any:
    """The output of one node. ``edges`` are the outputs before it and the data's."""
    arguments = {name: edges[origin] for name, origin in node.inputs.items()}
    operation: Any = node.operation
    if node.role is not None:
        arguments["engine"] = engines[node.role]
    elif operation.reads_tokens:
        operation = engines.hosted(operation)
    try:
        with below(f"graph.{node.name}"), edge(node.name):
            output = operation.run(**arguments)
    except (UserError, EngineError):
        raise
    except Exception as error:
        raise EngineError(f"node {node.name}, role {node.role}: {type(error).__name__}: {error}") from error
    check_advantages(node.name, output, arguments)
    return output


@dataclass(frozen=True)
class Evaluator:
    """The graph's own generation and reward, taking the likeliest token."""

    generate: GraphNode
    reward: GraphNode

    def run(self, engines: Engines, data: DataSource) -> float:
        """The mean reward of held-out prompts, of those that have one."""
        prompts = data.held_out_prompts()
        with edge("evaluation"):
            rollouts = run_node(self.generate, engines, dict.fromkeys(self.generate.inputs.values(), prompts))
            rewards = run_node(self.reward, engines, dict.fromkeys(self.reward.inputs.values(), rollouts))
        return mean_reward(rewards)


def evaluator(planned: Graph, graph: Graph) -> Evaluator:
    """Return the evaluation of a graph that generates its responses, ``planned`` as ``graph`` runs."""
    figure = evaluation_nodes(planned)
    assert figure is not None  # compiling has seen to it
    generate, reward = (next(node for node in graph.nodes if node.name == each.name) for each in figure)
    operation: Any = generate.operation
    return Evaluator(replace(generate, operation=operation.greedy()), reward)


def summary(name: str, output: Any) -> dict[str, float]:
    """What a node's output says in single numbers, under the node's name. Raises EngineError for rewards that are not
    there."""
    if isinstance(output, Metrics):
        return {f"{name}/{key}": value for key, value in output.values.items()}
    if isinstance(output, SummedRewards):
        metrics = {f"{name}/mean": mean_reward(output), f"{name}/failed": float(np.mean(output.reasons != ""))}
        # A single part is told by the sum; one that has failed everywhere has no mean.
        parts = output.parts if len(output.parts) > 1 else {}
        known = {part: values for part, values in parts.items() if np.isfinite(values).any()}
        return metrics | {f"{name}/{part}/mean": _known_mean(values) for part, values in known.items()}
    if isinstance(output, Rewards):
        return {f"{name}/mean": mean_reward(output)}
    if isinstance(output, Divergences):
        return {f"{name}/mean": _known_mean(output.values)}
    if isinstance(output, GaeAdvantages):
        return {f"{name}/explained_variance": output.explained_variance, f"{name}/kl": output.kl}
    if isinstance(output, Rollouts):
        lengths = output.own_lengths
        return {
            **(_of_conversations(name, output) if isinstance(output, Conversations) else {}),
            f"{name}/length_mean": float(np.mean(lengths)),
            **{f"{name}/length_p{quantile}": float(np.percentile(lengths, quantile)) for quantile in QUANTILES},
            f"{name}/length_max": int(np.max(lengths)),
            f"{name}/finished": float(np.mean(output.finished)),
            **({f"{name}/without_tokens": float(np.mean(lengths == 0))} if (lengths == 0).any() else {}),
        }
    return {}


def _of_conversations(name: str, output: Conversations) -> dict[str, float]:
    return {
        f"{name}/turns_mean": float(np.mean(output.turns)),
        f"{name}/failed": float(np.mean(output.reasons != "")),
    }


def reasons_of(output: Any) -> Mapping[str, int]:
    """Why samples could not be judged, the most frequent reason first, and how many each time."""
    if not isinstance(output, SummedRewards | Conversations):
        return {}
    return dict(Counter(reason for reason in output.reasons.tolist() if reason).most_common())


def mean_reward(rewards: Rewards) -> float:
    """Return the mean over the samples that have a reward. Raises EngineError where none has, or one is infinite."""
    if np.isnan(rewards.values).all():
        why = next(iter(reasons_of(rewards)), "what they are made of has none")
        raise EngineError(f"rewards: none of {len(rewards)} responses has one: {why}.")
    if infinite := int(np.isinf(rewards.values).sum()):
        raise EngineError(f"rewards: {infinite} of {len(rewards)} are infinite.")
    return _known_mean(rewards.values)


def _known_mean(values: NDArray[np.float32]) -> float:
    """Of those that are there; at least one is."""
    return float(np.nanmean(values, dtype=np.float64))
