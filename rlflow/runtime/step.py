"""One pass over the graph."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlflow.batch import Metrics, Prompts, Rewards, Rollouts
from rlflow.compiler.graph import Graph, GraphNode
from rlflow.errors import EngineError, UserError, below
from rlflow.nodes.generate import Generate
from rlflow.nodes.reward import Reward
from rlflow.resources.time.past_run import QUANTILES


def run_graph(
    graph: Graph, engines: Mapping[str, Any], sources: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, float]]:
    """The output of every node, and the seconds it took. ``sources`` are the data's edges of this step."""
    outputs: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for node in graph.nodes:
        began = time.perf_counter()
        outputs[node.name] = run_node(node, engines, {**sources, **outputs})
        seconds[node.name] = time.perf_counter() - began
    return outputs, seconds


def run_node(node: GraphNode, engines: Mapping[str, Any], edges: Mapping[str, Any]) -> Any:
    """The output of one node. ``edges`` are the outputs before it and the data's."""
    arguments = {name: edges[origin] for name, origin in node.inputs.items()}
    if node.role is not None:
        arguments["engine"] = engines[node.role]
    operation: Any = node.operation
    try:
        with below(f"graph.{node.name}"):
            return operation.run(**arguments)
    except (UserError, EngineError):
        raise
    except Exception as error:
        raise EngineError(f"node {node.name}, role {node.role}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Evaluator:
    """The graph's own generation and reward, on held-out prompts, taking the likeliest token."""

    generate: GraphNode
    reward: GraphNode
    prompts: Prompts

    def run(self, engines: Mapping[str, Any]) -> float:
        """The mean reward."""
        rollouts = run_node(self.generate, engines, dict.fromkeys(self.generate.inputs.values(), self.prompts))
        rewards = run_node(self.reward, engines, dict.fromkeys(self.reward.inputs.values(), rollouts))
        return float(np.mean(rewards.values, dtype=np.float64))


def evaluator(graph: Graph, prompts: Prompts) -> Evaluator:
    """Of a graph that has nodes of the kinds generate and reward; the first of each."""
    generate, reward = (
        next(node for node in graph.nodes if isinstance(node.operation, kind)) for kind in (Generate, Reward)
    )
    assert isinstance(generate.operation, Generate)
    greedy = replace(generate.operation, temperature=0.0, group_size=1)
    return Evaluator(replace(generate, operation=greedy), reward, prompts)


def summary(outputs: Mapping[str, Any]) -> dict[str, float]:
    """What one step's outputs say in single numbers, under the names of their nodes."""
    metrics: dict[str, float] = {}
    for name, output in outputs.items():
        if isinstance(output, Metrics):
            metrics |= {f"{name}/{key}": value for key, value in output.values.items()}
        elif isinstance(output, Rewards):
            metrics[f"{name}/mean"] = float(np.mean(output.values, dtype=np.float64))
        elif isinstance(output, Rollouts):
            lengths = output.response_ids.lengths
            metrics[f"{name}/length_mean"] = float(np.mean(lengths))
            for quantile in QUANTILES:
                metrics[f"{name}/length_p{quantile}"] = float(np.percentile(lengths, quantile))
            metrics[f"{name}/length_max"] = int(np.max(lengths))
            metrics[f"{name}/finished"] = float(np.mean(output.finished))
    return metrics
