"""Runs the nodes of a graph, with their states: in order, side by side, or on parts of a generation before its end."""

import copy
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

from rlflow.compiler.graph import Graph
from rlflow.errors import EngineError, NotFiniteError, UserError, below
from rlflow.nodes.base import GraphNode, Node, State
from rlflow.runtime.finite import check_advantages
from rlflow.runtime.generation.streaming_nodes import StreamingNodes
from rlflow.runtime.objects.store_usage import count_towards
from rlflow.runtime.protocols import Engines


class NodeState:
    """The state of a node during a run, which lives where the node runs. Checkpoints save it."""

    def __init__(self, state: State) -> None:
        self._state = state

    def run(self, node: Node, /, **inputs: Any) -> Any:
        """Run the node on its inputs."""
        return _run(node, self._state, inputs)

    def run_in_evaluation(self, node: Node, /, **inputs: Any) -> Any:
        """Run the node on its inputs, and leave the state as it is."""
        return _run(node, copy.deepcopy(self._state), inputs)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the state."""
        return dict(self._state.metrics())

    def save(self, folder: Path) -> None:
        """Write the state to ``folder``, a file for each of its entries."""
        for name, value in self._state.state_dict().items():
            (folder / f"{name}.json").write_text(json.dumps(value))

    def restore(self, folder: Path) -> None:
        """Read the state from ``folder``."""
        self._state.load_state_dict({path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")})


def _run(node: Any, state: State, inputs: Mapping[str, Any]) -> Any:
    return node.run(**inputs, state=state)


OnOutput = Callable[[str, Any], None]


class GraphRunner:
    """The nodes of a graph with what they need to run: the engines of their roles, and the states that they keep."""

    def __init__(self, graph: Graph, engines: Engines) -> None:
        """Begin a run, with new states."""
        self.engines = engines
        self._graph = graph
        self._states = {
            node.name: NodeState(state) for node in graph.nodes if (state := node.operation.new_state()) is not None
        }

    @property
    def states(self) -> dict[str, Any]:
        """Return the states of nodes by their path in the recipe, wherever they live."""
        return {f"graph.{node.name}": self._placed(node) for node in self._graph.nodes if node.name in self._states}

    def run(
        self,
        graph: Graph,
        edges: dict[str, Any],
        on_output: OnOutput = lambda name, output: None,
        *,
        ends_step: bool = False,
    ) -> dict[str, float]:
        """Run all nodes of ``graph``, the whole or a part, and return the seconds that each took.

        ``edges`` holds the data of this step, and gets the outputs of the nodes. Each edge is deleted when its last
        consumer has run. ``on_output`` is called with each output; a caller that keeps one keeps its columns in memory.

        Nodes that can work on parts of a step start before generation ends. Nodes whose roles have GPUs of their own
        run side by side. With ``ends_step`` weights are synced after this graph, so a role that has run its last node
        need not keep its own.
        """
        engines = self.engines
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
                for other in self._nodes_beside(node, graph, edges, early.keys() | streams.keys()):
                    inputs = {origin: edges[origin] for origin in other.inputs.values()}
                    early[other.name] = threads.submit(copy_context().run, self._run_timed, other, inputs)
                if node.name in streams:
                    output, spans = streams.pop(node.name).output(node, edges)
                    seconds[node.name] = note_times(engines, node.name, spans)
                elif node.name in early:
                    output, seconds[node.name] = early.pop(node.name).result()
                else:
                    with ExitStack() as subscriptions:
                        if followers := graph.streaming_consumers(node):
                            stream = StreamingNodes(node, followers, self.run_node, edges[node.inputs["prompts"]])
                            streams |= dict.fromkeys(
                                (follower.name for follower in followers), running.enter_context(stream)
                            )
                            # Engines that cannot stream give it nothing, and its nodes run once all is generated.
                            subscriptions.enter_context(engines.stream_to(stream, str(node.role)))
                            subscriptions.callback(stream.end)
                        output, seconds[node.name] = self._run_timed(node, edges)
                if ends_step and node.role is not None and last_nodes[node.role] == node.name:
                    engines.mark_idle(node.role)
                edges[node.name] = output
                on_output(node.name, output)
                del output
                for name in [name for name in edges if consumers.get(name, node.name) == node.name]:
                    del edges[name]
        return seconds

    def run_node(self, node: GraphNode, edges: Mapping[str, Any], *, in_evaluation: bool = False) -> Any:
        """Return the output of a node. ``edges`` holds the outputs of earlier nodes and the data.

        ``in_evaluation`` leaves the node's state as it is.
        """
        inputs = {name: edges[origin] for name, origin in node.inputs.items()}
        arguments = inputs if node.role is None else {**inputs, "engine": self.engines[node.role]}
        try:
            with below(f"graph.{node.name}"), count_towards(node.name), naming(node.name):
                placed = self._placed(node)
                if node.name not in self._states:
                    output = placed.run(**arguments)
                elif in_evaluation:
                    output = placed.run_in_evaluation(node.operation, **arguments)
                else:
                    output = placed.run(node.operation, **arguments)
                check_advantages(output, inputs)
        except (UserError, EngineError):
            raise
        except Exception as error:
            raise EngineError(f"node {node.name}, role {node.role}: {type(error).__name__}: {error}") from error
        return output

    def _placed(self, node: GraphNode) -> Any:
        """Return what runs a node, or its state: where tokens are, if it reads them and has no role."""
        if node.runs_on_every_host:
            return self.engines.place_with_samples(node.operation)
        local = self._states.get(node.name, node.operation)
        return self.engines.place_with_tokens(local) if node.role is None and node.operation.reads_tokens else local

    def _run_timed(self, node: GraphNode, edges: Mapping[str, Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        output = self.run_node(node, edges)
        return output, note_times(self.engines, node.name, [(start, time.perf_counter())])

    def _nodes_beside(
        self, node: GraphNode, graph: Graph, edges: Mapping[str, Any], started: Collection[str]
    ) -> Iterator[GraphNode]:
        """Yield later nodes that can start with ``node``: their inputs are there, and their GPUs are free until then.

        GPUs are free if none of the nodes from ``node`` on has a role that shares them.
        """
        before = [node]
        for later in graph.nodes[graph.nodes.index(node) + 1 :]:
            role, is_ready = later.role, edges.keys() >= set(later.inputs.values())
            can_start = role is not None and is_ready and later.name not in started
            apart = (self.engines.are_apart(str(role), earlier.role) for earlier in before)
            if can_start and not graph.streaming_consumers(later) and all(apart):
                yield later
            before.append(later)


def note_times(engines: Engines, node: str, spans: Sequence[tuple[float, float]]) -> float:
    """Note when a node ran, and return the seconds that it took."""
    for start, end in spans:
        engines.trace.add(node, start, end)
    return sum(end - start for start, end in spans)


@contextmanager
def naming(node: str) -> Iterator[None]:
    """Name the node in a NotFiniteError raised inside."""
    try:
        yield
    except NotFiniteError as error:
        error.node = error.node or node
        raise
