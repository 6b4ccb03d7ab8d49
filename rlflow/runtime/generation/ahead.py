"""Generation ahead of training: a thread generates later steps while the graph of this step trains.

The two threads meet in few places. The thread that trains takes the samples of its step (``run``), and says when the
policy has a new version (``sync``). Weights only leave the trained role while it is between two steps, and only reach
engines that generate nothing; ``Admission`` says which steps may start with which version.

How a weight sync comes to that moment is the recipe's ``overlap.in_flight``. ``wait``: the generation of a step ends
first. ``keep`` and ``abort``: the generation is interrupted, its unfinished samples become partial rollouts, and with
``abort`` these are dropped. Engines read a partial rollout anew with the new weights, so that every token has the
logprob of the version that it is marked with.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.compiler.graph import Graph, GraphNode
from rlflow.data.source import DataSource
from rlflow.errors import EngineError, UserError
from rlflow.recipe import Recipe
from rlflow.runtime.generation.admission import Admission
from rlflow.runtime.generation.ahead_nodes import AheadNodes, StepOutputs
from rlflow.runtime.generation.resampling import RunGraph
from rlflow.runtime.protocols import Engines

_STATE = "steps.json"
# Seconds in which the thread may end by itself; after that, its calls fail when the engines stop.
_CLOSE_S = 5.0


class AheadGeneration:
    """The nodes that run for later steps while a step trains. Checkpoints save and restore their rollouts.

    All methods are called by the thread that trains.
    """

    def __init__(
        self,
        planned: Graph,
        running: Graph,
        recipe: Recipe,
        engines: Engines,
        data: DataSource,
        run_graph: RunGraph,
        sync: Callable[[int], float],
    ) -> None:
        """Run the nodes of ``running`` that can run ahead in the graph as ``planned``, by ``run_graph``.

        ``sync`` copies the weights of a version, and returns the seconds that it took.
        """
        self._engines = engines
        self._nodes = AheadNodes(planned, running, engines, data, run_graph)
        self._sync = sync
        self._overlap = recipe.overlap
        self._admission = Admission(recipe.overlap, recipe.steps)
        self._steps: dict[int, StepOutputs] = {}
        """The outputs of later steps."""
        self._judged: dict[int, Future[None]] = {}
        """Completes when the nodes have run that judge the samples of a step. None where generation included them."""
        self._changed = threading.Condition()
        """Guards everything below, and ``_admission`` and ``_steps``."""
        self._judging = ThreadPoolExecutor(1, "judging")
        self._thread: threading.Thread | None = None
        self._is_generating = self._is_training = self._is_closing = False
        self._num_pauses = 0
        self._interrupt: Future[None] = Future()
        self._error: BaseException | None = None
        self._seconds = {"train_idle": 0.0, "generate_idle": 0.0, "copy": 0.0}
        self._excused = 0.0
        """Seconds so far in which both sides copied weights, or a pause kept them from working."""
        for node in self._nodes.generators:
            engines.on_lost_weights(str(node.role), self._resync)

    @property
    def path(self) -> str:
        """Return the path in the recipe of the node whose rollouts are saved."""
        return f"graph.{self._nodes.generators[0].name}"

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        """Return the nodes that run ahead."""
        return self._nodes.graph.nodes

    def sync(self, version: int) -> float:
        """Take note of a new version of the policy; the engines get it as soon as the recipe allows.

        Returns the seconds of weight syncs since the last call. The first call starts the generation.
        """
        self._engines.expect_release(())
        with self._changed:
            self._is_training = False
            self._admission.step_trained(version)
            if self._thread is None:
                self._load()
                self._thread = threading.Thread(target=self._work, name="generation ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._interrupt_generation()
            may_come_later = self._overlap.in_flight == "wait" and not self._overlap.deterministic
            self._seconds["train_idle"] += self._wait_until(
                lambda: not self._admission.has_new_weights or (may_come_later and self._is_generating)
            )
            return self._take("copy")

    def run(
        self, engines: Engines, step: int, edges: dict[str, Any], on_output: Callable[[str, Any], None]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Put the outputs for a step into ``edges`` once complete; return the seconds of each node, and metrics.

        The weights of the trained role may change from now on, until the next ``sync``.
        """
        with self._changed:
            self._seconds["train_idle"] += self._wait_until(lambda: self._admission.is_complete(step))
            found, judged = self._steps.pop(step), self._judged.pop(step, None)
            self._is_training = True
        engines.expect_release([node.name for node in self.nodes])
        if judged is not None:
            judged.result()
        edges |= {**self._nodes.later_inputs(step), **found.outputs}
        for node in self.nodes:
            on_output(node.name, edges[node.name])
        counts = [self._admission.staleness(step, edges[node.name]) for node in self._nodes.generators]
        return found.seconds, self._metrics(np.sum(counts, axis=0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Generate nothing ahead within the context, in which the engines have the newest weights."""
        with self._changed:
            self._num_pauses += 1
            self._interrupt_generation()
            self._wait_until(lambda: not self._is_generating)
            judged = list(self._judged.values())
        wait(judged)
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._excused += time.perf_counter() - start
                self._changed.notify_all()

    def save(self, folder: Path) -> None:
        """Save the rollouts of later steps, partial ones included."""
        with self.paused():
            for step, found in self._steps.items():
                self._nodes.save(folder, step, found)
            state = {step: self._admission.is_complete(step) for step in self._steps}
            (folder / _STATE).write_text(json.dumps(state))

    def restore(self, folder: Path) -> None:
        """Restore what ``save`` saved, before the first ``sync``."""
        state = {int(step): is_complete for step, is_complete in json.loads((folder / _STATE).read_text()).items()}
        self._steps = {step: self._nodes.restored(folder, step) for step in state}
        for step in (step for step, is_complete in state.items() if is_complete):
            self._judged[step] = self._judging.submit(self._nodes.judge, self._steps[step])
            self._admission.completed(step)

    def close(self) -> None:
        """End the thread, or leave it to end when its engines stop."""
        with self._changed:
            self._is_closing = True
            self._interrupt_generation()
            self._changed.notify_all()
        self._judging.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _wait_until(self, is_met: Callable[[], bool]) -> float:
        """Wait for the generating thread; load new weights first, as soon as it generates nothing. Needs the lock.

        Returns the seconds of the wait, without those in which weights were copied.
        """
        start, excused = time.perf_counter(), self._excused
        while True:
            if self._error is not None:
                raise self._error
            if self._admission.has_new_weights and not self._is_generating and self._admission.may_load:
                self._load()
            if is_met():
                break
            self._changed.wait()
        return time.perf_counter() - start - (self._excused - excused)

    def _load(self) -> None:
        """Copy the newest weights to engines that generate nothing. Needs the lock."""
        self._copy()
        if self._overlap.in_flight == "abort":
            for step, found in self._steps.items():
                if not self._admission.is_complete(step):
                    self._nodes.drop_unfinished(found)
        self._changed.notify_all()

    def _resync(self) -> None:
        """Copy weights to engines that are all new, in the middle of a generation and in its thread.

        The trained role sends the weights that it has after its step.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or not self._is_training)
            if self._is_closing:
                raise EngineError("the run has ended.")
            if self._overlap.deterministic and self._admission.has_new_weights:
                raise EngineError(
                    f"all engines of a role have failed, and version {self._admission.version} of the policy, which "
                    "overlap.deterministic asks them for, has been trained since. Fix: resume=true continues from the "
                    "last checkpoint, overlap.deterministic=false generates with newer weights."
                )
            self._copy()

    def _copy(self) -> None:
        seconds = self._sync(self._admission.trained)
        self._admission.loaded()
        self._seconds["copy"] += seconds
        self._excused += seconds

    def _work(self) -> None:
        """Generate admitted steps until the end of the run; the generating thread."""
        try:
            while True:
                with self._changed:
                    start, excused = time.perf_counter(), self._excused
                    self._changed.wait_for(lambda: self._is_closing or self._next_steps())
                    # A pause may have started before this wait.
                    idle = time.perf_counter() - start - (self._excused - excused)
                    self._seconds["generate_idle"] += max(0.0, idle)
                    if self._is_closing:
                        return
                    steps = self._next_steps()
                    self._is_generating, self._interrupt = True, Future()
                self._generate(steps)
                with self._changed:
                    self._is_generating = False
                    self._changed.notify_all()
        except BaseException as error:  # raised again in the thread that trains, which would wait forever
            with self._changed:
                self._error = error
                if not isinstance(error, EngineError | UserError):
                    self._error = EngineError(f"generation ahead: {type(error).__name__}: {error}")
                    self._error.__cause__ = error
                self._is_generating = False
                self._changed.notify_all()

    def _next_steps(self) -> list[int]:
        """Return the steps to generate now; none while new weights can be loaded first. Needs the lock."""
        loads_first = not self._is_training and self._admission.has_new_weights and self._admission.may_load
        return [] if self._num_pauses or loads_first else self._admission.admitted()

    def _interrupt_generation(self) -> None:
        """Interrupt a generation that can be resumed. Needs the lock."""
        if self._overlap.in_flight != "wait" and not self._interrupt.done():
            self._interrupt.set_result(None)

    def _generate(self, steps: Sequence[int]) -> None:
        """Generate the first step, or samples of all these steps until they are complete or an interrupt comes."""
        if self._overlap.in_flight == "wait":
            found = self._nodes.run(steps[0])
            with self._changed:
                self._steps[steps[0]] = found
                self._admission.completed(steps[0])
            return
        with self._changed:
            before = {step: self._steps.setdefault(step, StepOutputs()) for step in steps}
        self._nodes.advance(before, self._interrupt, self._note_complete)

    def _note_complete(self, step: int) -> None:
        with self._changed:
            self._judged[step] = self._judging.submit(self._nodes.judge, self._steps[step])
            self._admission.completed(step)
            self._changed.notify_all()

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
