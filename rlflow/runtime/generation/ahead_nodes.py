"""The nodes of a graph that can run before their step, and what they have produced for a step so far."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Batch, Conversations, Prompts, Rollouts
from rlflow.batch.files import read_rollouts, write_rollouts
from rlflow.compiler.graph import Graph
from rlflow.data.source import DataSource
from rlflow.engines.group_progress import GroupProgress
from rlflow.errors import EngineError, NotFiniteError
from rlflow.nodes.base import GraphNode
from rlflow.nodes.generate import Generate
from rlflow.runtime.generation.dispatcher import LaterSteps
from rlflow.runtime.generation.resampling import RunGraph
from rlflow.runtime.objects.store_usage import count_towards
from rlflow.runtime.protocols import Engines


@dataclass
class StepOutputs:
    """The outputs of these nodes for one step."""

    outputs: dict[str, Any] = field(default_factory=dict)
    """The output of each node that has run. Rollouts of an incomplete step are partial."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The time of each node."""
    error: NotFiniteError | None = None
    """The reason why the step is skipped: an output that is not finite."""


class AheadNodes:
    """Runs the nodes that generate, and those that judge their samples and groups."""

    def __init__(self, graph: Graph, engines: Engines, data: DataSource, run_graph: RunGraph) -> None:
        """Take the nodes of a graph that generate or judge samples."""
        self._engines, self._data, self._run_graph = engines, data, run_graph
        self.graph = Graph(nodes=graph.ahead_nodes())
        self.generators = tuple(node for node in self.graph.nodes if isinstance(node.operation, Generate))
        self.is_closed = False
        """True once nobody waits for outputs any more. A node that runs is the last one."""
        self._judges = self.graph.without(self.generators)
        self._later = graph.without(self.graph.nodes)

    def run(self, steps: Sequence[int]) -> dict[int, StepOutputs]:
        """Generate and judge all samples of these steps together."""
        sources = [self._read(self.graph, step) for step in steps]
        num_prompts = [len(next(iter(source.values()))) for source in sources]
        edges = {name: type(first).concatenate([part[name] for part in sources]) for name, first in sources[0].items()}
        outputs: dict[str, Any] = {}
        seconds: Mapping[str, float] = {}

        def note_output(name: str, output: Any) -> None:
            if self.is_closed:
                raise EngineError("the run has ended.")
            outputs[name] = output

        problem: NotFiniteError | None = None
        try:
            seconds = self._run_graph(self.graph, edges, note_output)
        except NotFiniteError as error:
            problem = error
        outputs_of: dict[int, StepOutputs] = {}
        for index, step in enumerate(steps):
            start, end = (sum(num_prompts[:until]) / sum(num_prompts) for until in (index, index + 1))
            outputs_of[step] = StepOutputs(
                {name: _take_share(output, start, end) for name, output in outputs.items()},
                {name: value * (end - start) for name, value in seconds.items()},
                problem,
            )
        return outputs_of

    def advance(
        self, outputs_of: Mapping[int, StepOutputs], interrupt: "Future[None]", on_complete: Callable[[int], None]
    ) -> None:
        """Continue the rollouts of these steps until all are complete, or the ``interrupt`` completes.

        ``on_complete`` gets each step as soon as it is complete.
        """
        (node,) = self.generators
        operation: Any = node.operation
        complete: set[int] = set()
        last = time.perf_counter()

        def note_time(step: int) -> None:
            """Count the seconds since the last call as this step's, although engines also wrote later steps in them."""
            nonlocal last
            now, seconds = time.perf_counter(), outputs_of[step].seconds
            seconds[node.name] = seconds.get(node.name, 0.0) + now - last
            self._engines.trace.add(node.name, last, now)
            last = now

        def note_complete(step: int, rollouts: Rollouts) -> None:
            # Engines that fail after they have delivered a step generate it again, for nothing.
            if step not in complete:
                complete.add(step)
                outputs_of[step].outputs[node.name] = rollouts
                note_time(step)
                on_complete(step)

        with count_towards(node.name):
            prompts = {step: self._data.prompts(step) for step in outputs_of}
            generated = [step_outputs.outputs for step_outputs in outputs_of.values()]
            partial = [outputs[node.name] for outputs in generated if node.name in outputs]
            rollouts = self._engines[str(node.role)].generate_ahead(
                Prompts.concatenate(list(prompts.values())),
                operation.sampling,
                Rollouts.concatenate(partial) if partial else None,
                LaterSteps(interrupt, note_complete),
            )
            if rollouts is None:
                return
            for step in outputs_of.keys() - complete:
                of_step = rollouts.take(np.flatnonzero(rollouts.keys[:, 0] == step))
                if GroupProgress(prompts[step], operation.sampling, of_step).complete.all():
                    note_complete(step, of_step)
                elif len(of_step):
                    # Engines may die, and a block stays in the object store as long as any row of it is in use.
                    outputs_of[step].outputs[node.name] = self._data.copy_locally(of_step)
        if unfinished := outputs_of.keys() - complete:
            note_time(min(unfinished))

    def later_inputs(self, step: int) -> dict[str, Any]:
        """Return the data that the other nodes of the graph read."""
        return self._read(self._later, step)

    def judge(self, step_outputs: StepOutputs) -> None:
        """Run the nodes that judge a step's samples."""
        if self._judges.nodes:
            edges = dict(step_outputs.outputs)
            step_outputs.seconds |= self._run_graph(self._judges, edges, step_outputs.outputs.__setitem__)

    def save(self, folder: Path, step: int, step_outputs: StepOutputs) -> None:
        """Save what is generated for a step."""
        for node in self.generators:
            if node.name in step_outputs.outputs:
                save_rollouts(_file(folder, step, node), step_outputs.outputs[node.name], self._data.prompts(step))

    def restored(self, folder: Path, step: int) -> StepOutputs:
        """Return the outputs of a step that ``save`` saved."""
        files = {node.name: _file(folder, step, node) for node in self.generators}
        prompts = self._data.prompts(step)
        return StepOutputs(
            {
                name: self._data.copy_locally(load_rollouts(file, prompts))
                for name, file in files.items()
                if file.exists()
            }
        )

    def _read(self, graph: Graph, step: int) -> dict[str, Any]:
        edges: dict[str, Any] = {}
        for source in graph.sources:
            with count_towards(source):
                edges[source] = getattr(self._data, source)(step)
        return edges


def _take_share(output: Batch, start: float, end: float) -> Batch:
    """Return the rows of a step, which are between these shares of all rows."""
    first, last = round(start * len(output)), round(end * len(output))
    return output if last - first == len(output) else output.take(np.arange(first, last))


def _file(folder: Path, step: int, node: GraphNode) -> Path:
    return folder / f"{step}-{node.name}.npz"


def save_rollouts(file: Path, rollouts: Rollouts, prompts: Prompts) -> None:
    """Write rollouts of these prompts to ``file``, which ends in ``.npz``.

    Unfinished conversations with an environment that JSON cannot hold are left out, and begin again in a resumed run:
    their environment is a pickle, and a checkpoint may come from anyone.
    """
    rollouts, rows = _without_pickles(rollouts), _rows_of(prompts)
    write_rollouts(file, rollouts, [rows[key] for key in _prompt_keys(rollouts.keys)])


def load_rollouts(file: Path, prompts: Prompts) -> Rollouts:
    """Return the rollouts that ``save_rollouts`` wrote for the same prompts."""
    rollouts, rows = read_rollouts(file), _rows_of(prompts)
    keys = _prompt_keys(rollouts.keys)
    full_rows = tuple(rows[key] | dict(added) for key, added in zip(keys, rollouts.rows, strict=True))
    places = {key: place for place, key in enumerate(rows)}
    images = None if prompts.images is None else prompts.images.take(np.array([places[key] for key in keys], np.int64))
    return _without_pickles(replace(rollouts, rows=full_rows, images=images))


def _without_pickles(rollouts: Rollouts) -> Rollouts:
    """Return the rollouts without unfinished conversations whose environment is a pickle."""
    if not isinstance(rollouts, Conversations):
        return rollouts
    rests = (rollouts.unfinished[row].tobytes() for row in range(len(rollouts)))
    return rollouts.take(np.flatnonzero([not rest or rest.startswith(b"{") for rest in rests]))


def _rows_of(prompts: Prompts) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the row of each prompt, by step and prompt."""
    return {key: dict(row) for key, row in zip(_prompt_keys(prompts.keys), prompts.rows, strict=True)}


def _prompt_keys(keys: NDArray[np.int64]) -> list[tuple[int, int]]:
    return [(int(step), int(prompt)) for step, prompt, _ in keys]
