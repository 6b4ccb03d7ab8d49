"""Generation ahead of training: what both of its forms share.

Where engines have GPUs of their own, they generate later steps while a step trains (``ahead_own_gpus``). Where they
share GPUs with training, the two take turns, and later steps fill the engines before a turn ends
(``ahead_shared_gpus``).

Weights only leave the trained role while it is between two steps, and only reach engines that generate nothing;
``Admission`` says which steps may start with which version. With ``overlap.in_flight: keep``, a generation may end with
unfinished samples. They become partial rollouts, which engines read anew with the new weights, so that every token has
the logprob of the version that it is marked with.
"""

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.compiler.graph import Graph
from rlflow.data.source import DataSource
from rlflow.errors import NotFiniteError, make_printable
from rlflow.nodes.base import GraphNode
from rlflow.recipe import Recipe
from rlflow.runtime.generation.admission import Admission
from rlflow.runtime.generation.ahead_nodes import AheadNodes, StepOutputs
from rlflow.runtime.generation.resampling import RunGraph
from rlflow.runtime.protocols import Engines

_STATE = "steps.json"


class AheadGeneration(ABC):
    """The nodes that run for later steps. Checkpoints save and restore their rollouts.

    All public methods are called by the thread that trains.
    """

    def __init__(
        self,
        graph: Graph,
        recipe: Recipe,
        engines: Engines,
        data: DataSource,
        run_graph: RunGraph,
        sync: Callable[[int], float],
    ) -> None:
        """Run the nodes of ``graph`` that can run ahead, by ``run_graph``.

        ``sync`` copies the weights of a version, and returns the seconds that it took.
        """
        self._engines = engines
        self._nodes = AheadNodes(graph, engines, data, run_graph)
        self._sync = sync
        self._overlap = recipe.overlap
        self._admission = Admission(recipe.overlap, recipe.steps)
        self._steps: dict[int, StepOutputs] = {}
        """The outputs of later steps."""
        self._judged: dict[int, Future[None]] = {}
        """Completes when the nodes have run that judge the samples of a step. None where generation included them."""
        self._changed = threading.Condition()
        """Guards ``_admission``, ``_steps`` and what a subclass adds."""
        self._judging = ThreadPoolExecutor(1, "judging")
        self._interrupt: Future[None] = Future()
        self._seconds = {"train_idle": 0.0, "generate_idle": 0.0, "copy": 0.0}

    @property
    def path(self) -> str:
        """Return the path in the recipe of the node whose rollouts are saved."""
        return f"graph.{self._nodes.generators[0].name}"

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        """Return the nodes that run ahead."""
        return self._nodes.graph.nodes

    @abstractmethod
    def sync(self, version: int) -> float:
        """Take note of a new version of the policy; the engines get it as soon as the recipe allows.

        Returns the seconds of weight syncs since the last call. The first call comes before the first step.
        """

    def run(
        self, step: int, edges: dict[str, Any], on_output: Callable[[str, Any], None]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Put the outputs for a step into ``edges`` once complete; return the seconds of each node, and metrics.

        The weights of the trained role may change from now on, until the next ``sync``.
        """
        self._complete(step)
        with self._changed:
            step_outputs, judged = self._steps.pop(step), self._judged.pop(step, None)
        start = time.perf_counter()
        try:
            if judged is not None:
                judged.result()
        finally:
            self._note_judged(time.perf_counter() - start)
            edges |= {**self._nodes.later_inputs(step), **step_outputs.outputs}
        if step_outputs.error is not None:
            raise step_outputs.error
        for node in self.nodes:
            on_output(node.name, edges[node.name])
        counts = [self._admission.staleness(step, edges[node.name]) for node in self._nodes.generators]
        return step_outputs.seconds, self._metrics(np.sum(counts, axis=0))

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Generate nothing ahead within the context, in which the engines have the newest weights."""

    def save(self, folder: Path) -> None:
        """Save the rollouts of later steps, partial ones included."""
        for step, step_outputs in self._steps.items():
            self._nodes.save(folder, step, step_outputs)
        state = {
            step: {
                "is_complete": self._admission.is_complete(step),
                "error": step_outputs.error and {"node": step_outputs.error.node, "fact": step_outputs.error.args[0]},
            }
            for step, step_outputs in self._steps.items()
        }
        (folder / _STATE).write_text(json.dumps(state))

    def restore(self, folder: Path) -> None:
        """Restore what ``save`` saved, before the first ``sync``."""
        state = {int(step): saved for step, saved in json.loads((folder / _STATE).read_text()).items()}
        for step, saved in state.items():
            step_outputs = self._steps[step] = self._nodes.restored(folder, step)
            if saved["error"]:
                # Judged by itself it might be trained: the bad value may be in a step that was judged with it.
                step_outputs.error = NotFiniteError(make_printable(saved["error"]["fact"]))
                step_outputs.error.node = make_printable(saved["error"]["node"])
            if saved["is_complete"]:
                self._judged[step] = self._judging.submit(self._nodes.judge, step_outputs)
                self._admission.completed(step)

    def close(self) -> None:
        """Judge no more samples, and run no other node after the one that runs."""
        self._nodes.is_closed = True
        self._judging.shutdown(wait=False, cancel_futures=True)

    @abstractmethod
    def _complete(self, step: int) -> None:
        """Return when all samples of a step are generated."""

    def _note_judged(self, seconds: float) -> None:
        """Note how long a complete step has waited until its samples were judged."""
        self._seconds["train_idle"] += seconds

    def _load(self) -> None:
        """Copy the newest weights to engines that generate nothing. Needs the lock."""
        self._copy()
        self._changed.notify_all()

    def _copy(self) -> None:
        self._seconds["copy"] += self._sync(self._admission.trained)
        self._admission.loaded()

    def _generate(self, steps: Sequence[int]) -> None:
        """Generate all samples of these steps, or until an interrupt comes."""
        if self._overlap.in_flight == "wait":
            # This thread judges samples too, and nodes take one call at a time. Samples of a checkpoint come first.
            self._wait_for_judges()
            generated = self._nodes.run(steps)
            with self._changed:
                self._steps |= generated
                for step in steps:
                    self._admission.completed(step)
        else:
            with self._changed:
                outputs_of = {step: self._steps.setdefault(step, StepOutputs()) for step in steps}
            self._nodes.advance(outputs_of, self._interrupt, self._note_complete)

    def _note_complete(self, step: int) -> None:
        """Note that a step is complete, while others may still be generated."""
        with self._changed:
            self._judged[step] = self._judging.submit(self._nodes.judge, self._steps[step])
            self._admission.completed(step)
            self._changed.notify_all()

    def _wait_for_judges(self) -> None:
        """Wait until the samples of all complete steps are judged."""
        with self._changed:
            judged = list(self._judged.values())
        wait(judged)

    def _take(self, name: str) -> float:
        """Return the seconds of this kind since the last call."""
        seconds, self._seconds[name] = self._seconds[name], 0.0
        return seconds

    def _metrics(self, counts: NDArray[np.int64]) -> dict[str, float]:
        shares = counts / counts.sum()
        with self._changed:
            idle = {f"overlap/{name}_seconds": self._take(name) for name in ("train_idle", "generate_idle")}
        return {
            "overlap/staleness_mean": float(shares @ np.arange(len(shares))),
            "overlap/staleness_max": float(np.flatnonzero(counts)[-1]),
            **{f"overlap/staleness_{age}": float(share) for age, share in enumerate(shares)},
            **idle,
        }
