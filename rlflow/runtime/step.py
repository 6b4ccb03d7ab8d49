"""One training step: a pass over the graph, and the new weights to the roles that follow."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol

from rlflow.batch import Sequences
from rlflow.compiler.graph import Graph, GraphNode
from rlflow.compiler.plan import Plan
from rlflow.data.source import DataSource
from rlflow.errors import EngineError, NotFiniteError, UserError, below
from rlflow.nodes.minibatches import schedule_behind
from rlflow.runtime.bound_node import BoundNode, operation_of, states_of
from rlflow.runtime.finite import check_advantages, check_values
from rlflow.runtime.generation.streaming_nodes import StreamingNodes
from rlflow.runtime.measurements import figures_per_gpu
from rlflow.runtime.objects.budget import edge
from rlflow.runtime.protocols import Engines, Observer
from rlflow.runtime.samples import SampleReader
from rlflow.runtime.utilization import UpdateWork

OnOutput = Callable[[str, Any], None]
SKIPPED = "skipped_at/"
"""The metric of a skipped step is this and the name of the node whose values are not finite."""


class Skips(Protocol):
    """The steps of a run that are skipped, because some of their values are not finite."""

    @property
    def count(self) -> int:
        """Return their number so far."""

    def add(self, step: int, error: NotFiniteError, edges: Mapping[str, Any]) -> None:
        """Skip a step, counted from 1, and save what is on its edges. Raises EngineError if the run has to end."""


class StepStart(Protocol):
    """The part of a step before the rest of its graph: it generates in rounds, or has been generated before."""

    def run(
        self, engines: Engines, step: int, edges: dict[str, Any], on_output: OnOutput
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Put the outputs that the rest needs into ``edges``; return the seconds of each node, and metrics."""


def train_step(
    plan: Plan,
    engines: Engines,
    data: DataSource,
    step: int,
    *,
    observer: Observer | None = None,
    start_of_step: StepStart | None = None,
    sync: Callable[[int], float] | None = None,
    sample_reader: SampleReader | None = None,
    skips: Skips | None = None,
    work: UpdateWork | None = None,
) -> dict[str, float]:
    """Run the graph once on the data of ``step``, sync the weights, and return the metrics.

    A step with values that are not finite ends there: ``skips`` takes note of it, and the roles that follow get the
    weights that the trained roles have. Without ``skips`` it raises an error.
    ``start_of_step`` runs before the rest of the graph, where it has any. ``sync`` gets the version of the new weights,
    and returns the seconds of the weight sync; by default all followers get them at once. Metrics of time are named
    ``seconds``, ``per_second`` or ``mfu``; the last comes from the ``work`` of updates. The ``observer`` gets the
    reasons why samples could not be judged, and what the ``sample_reader`` reads.
    """
    start = time.perf_counter()
    metrics: dict[str, float] = {}
    # The values with which the step begins.
    states = {path: dict(each.state_metrics()) for path, each in states_of(plan.graph, engines).items()}
    edges: dict[str, Any] = {}
    tokens = longest_edge = 0

    def on_output(name: str, output: Any) -> None:
        nonlocal tokens, longest_edge
        with _naming(name):
            check_values(output, edges.values())
            metrics.update(metrics_of(name, output))
        if observer and (failures := failures_of(output)):
            observer.failed(step + 1, name, failures)
        if observer and sample_reader and (samples := sample_reader.read(step, name, output, edges)):
            observer.sampled(samples)
        if isinstance(output, Sequences):
            tokens += int(output.own_lengths.sum())
            longest_edge = max(longest_edge, int((output.prompt_ids.lengths + output.response_ids.lengths).sum()))

    seconds: dict[str, float] = {}
    read = {"prompts": data.prompts, "examples": data.examples, "pairs": data.pairs}
    try:
        try:
            if start_of_step:
                seconds, start_metrics = start_of_step.run(engines, step, edges, on_output)
                metrics.update(start_metrics)
            for name in () if start_of_step else plan.graph.sources:
                with edge(name):
                    edges[name] = read[name](step)
                on_output(name, edges[name])
            if edges:
                with schedule_behind(skips.count if skips else 0):
                    seconds |= run_graph(plan.graph, engines, edges, on_output, ends_step=True)
        except NotFiniteError as error:
            if skips is None:
                raise
            skips.add(step + 1, error, edges)
            metrics[f"{SKIPPED}{error.node}"] = 1.0
            # The times of a part of a step are comparable with nothing.
            seconds, longest_edge = {}, 0
            edges.clear()
        seconds["copy"] = sync(step + 1) if sync else sync_followers(plan, engines, version=step + 1)
    except EngineError as error:
        raise EngineError(f"step {step + 1}: {error}") from error
    total = _note_times(engines, "step", [(start, time.perf_counter())])
    return {
        **metrics,
        "tokens": tokens,
        "tokens_per_second": tokens / total,
        "seconds": total,
        **(figures_per_gpu(plan, seconds, total, longest_edge) if longest_edge else {}),
        **(work.take_utilization(seconds) if work else {}),
        **{f"seconds/{name}": value for name, value in seconds.items()},
        **engines.step_metrics(step + 1),
        **{f"{path.removeprefix('graph.')}/{name}": v for path, state in states.items() for name, v in state.items()},
    }


def sync_followers(plan: Plan, engines: Engines, version: int) -> float:
    """Sync the weights of trained roles to the roles that follow them, and return the seconds it took."""
    start = time.perf_counter()
    for sync in plan.workload.copies:
        engines[sync.target].load_weights(engines[sync.source].weights(), version)
    return _note_times(engines, "copy", [(start, time.perf_counter())])


def run_graph(
    graph: Graph,
    engines: Engines,
    edges: dict[str, Any],
    on_output: OnOutput = lambda name, output: None,
    *,
    ends_step: bool = False,
) -> dict[str, float]:
    """Run all nodes of a graph, and return the seconds that each took.

    ``edges`` holds the data of this step, and gets the outputs of the nodes. Each edge is deleted when its last
    consumer has run. ``on_output`` is called with each output; a caller that keeps one keeps its columns in memory.

    Nodes that can work on parts of a step start before generation ends. Nodes whose roles have GPUs of their own run
    side by side. With ``ends_step`` weights are synced after this graph, so a role that has run its last node need not
    keep its own.
    """
    seconds: dict[str, float] = {}
    consumers = {origin: node.name for node in graph.nodes for origin in node.inputs.values()}
    last_nodes = {node.role: node.name for node in graph.nodes}
    for role in engines.keys() - last_nodes.keys() if ends_step else ():
        engines.mark_idle(role)
    streams: dict[str, StreamingNodes] = {}
    early: dict[str, Future[tuple[Any, float]]] = {}
    with ExitStack() as running:
        threads = running.enter_context(ThreadPoolExecutor(len(graph.nodes) or 1, "node"))
        for node in graph.nodes:
            for other in _nodes_beside(node, graph, engines, edges, early.keys() | streams.keys()):
                inputs = {origin: edges[origin] for origin in other.inputs.values()}
                early[other.name] = threads.submit(copy_context().run, _run_timed, other, engines, inputs)
            if node.name in streams:
                output, spans = streams.pop(node.name).output(node, edges)
                seconds[node.name] = _note_times(engines, node.name, spans)
            elif node.name in early:
                output, seconds[node.name] = early.pop(node.name).result()
            else:
                start = time.perf_counter()
                with ExitStack() as subscriptions:
                    if followers := graph.streaming_consumers(node):
                        prompts = edges[node.inputs["prompts"]]
                        stream = StreamingNodes(node, followers, partial(_run_follower, engines), prompts)
                        streams |= dict.fromkeys((each.name for each in followers), running.enter_context(stream))
                        subscriptions.enter_context(engines.stream_to(stream, str(node.role)))
                        subscriptions.callback(stream.end)
                    output = run_node(node, engines, edges)
                seconds[node.name] = _note_times(engines, node.name, [(start, time.perf_counter())])
            if ends_step and node.role is not None and last_nodes[node.role] == node.name:
                engines.mark_idle(node.role)
            edges[node.name] = output
            on_output(node.name, output)
            del output
            for name in [name for name in edges if consumers.get(name, node.name) == node.name]:
                del edges[name]
    return seconds


def run_node(node: GraphNode, engines: Engines, edges: Mapping[str, Any], *, in_evaluation: bool = False) -> Any:
    """Return the output of a node. ``edges`` holds the outputs of earlier nodes and the data.

    ``in_evaluation`` leaves the node's state as it is.
    """
    inputs = {name: edges[origin] for name, origin in node.inputs.items()}
    arguments = inputs if node.role is None else {**inputs, "engine": engines[node.role]}
    operation = operation_of(node, engines)
    run = operation.run_in_evaluation if in_evaluation and isinstance(node.operation, BoundNode) else operation.run
    try:
        with below(f"graph.{node.name}"), edge(node.name), _naming(node.name):
            output = run(**arguments)
            check_advantages(output, inputs)
    except (UserError, EngineError):
        raise
    except Exception as error:
        raise EngineError(f"node {node.name}, role {node.role}: {type(error).__name__}: {error}") from error
    return output


@contextmanager
def _naming(node: str) -> Iterator[None]:
    """Name the node in a NotFiniteError raised inside."""
    try:
        yield
    except NotFiniteError as error:
        error.node = error.node or node
        raise


def _nodes_beside(
    node: GraphNode, graph: Graph, engines: Engines, edges: Mapping[str, Any], started: Collection[str]
) -> Iterator[GraphNode]:
    """Yield later nodes that can start with ``node``: their inputs are there, and their GPUs are free until their turn.

    GPUs are free if none of the nodes from ``node`` on has a role that shares them.
    """
    before = [node]
    for later in graph.nodes[graph.nodes.index(node) + 1 :]:
        role, is_ready = later.role, edges.keys() >= set(later.inputs.values())
        can_start = role is not None and is_ready and later.name not in started
        roles = [str(each.role) for each in before if each.role is not None]
        if can_start and not graph.streaming_consumers(later) and all(engines.are_apart(of, str(role)) for of in roles):
            yield later
        before.append(later)


def _run_timed(node: GraphNode, engines: Engines, edges: Mapping[str, Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    output = run_node(node, engines, edges)
    return output, _note_times(engines, node.name, [(start, time.perf_counter())])


def _note_times(engines: Engines, node: str, spans: Sequence[tuple[float, float]]) -> float:
    """Note when a node ran, and return the seconds that it took."""
    for start, end in spans:
        engines.trace.add(node, start, end)
    return sum(end - start for start, end in spans)


def _run_follower(engines: Engines, node: GraphNode, edges: Mapping[str, Any]) -> Any:
    return run_node(node, engines, edges)


def metrics_of(name: str, output: Any) -> dict[str, float]:
    """Return the metrics that the output of node ``name`` declares, as NODE/METRIC."""
    declared: Mapping[str, float] = output.metrics() if hasattr(output, "metrics") else {}
    return {f"{name}/{metric}": value for metric, value in declared.items()}


def failures_of(output: Any) -> Mapping[str, int]:
    """Return why samples of an output could not be judged, and how many samples each."""
    failures: Mapping[str, int] = output.failures() if hasattr(output, "failures") else {}
    return failures
