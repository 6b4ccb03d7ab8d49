"""Generation ahead of training on GPUs of its own: a thread generates later steps while a step trains.

The two threads meet in few places. The thread that trains takes the samples of its step (``run``), and says when the
policy has a new version (``sync``).

How a weight sync comes to a moment in which nothing is generated is the recipe's ``overlap.in_flight``. ``wait``: the
generation of a step ends first. ``keep``: the generation is interrupted.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlflow.errors import EngineError, UserError
from rlflow.runtime.generation.ahead import AheadGeneration

# Seconds in which the thread may end by itself; after that, its calls fail when the engines stop.
_CLOSE_S = 5.0


class AheadOnOwnGpus(AheadGeneration):
    """Generation that goes on while a step trains."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._thread: threading.Thread | None = None
        self._is_generating = self._is_training = self._is_closing = False
        self._num_pauses = 0
        self._error: BaseException | None = None
        self._excused = 0.0
        """Seconds so far in which both sides copied weights, or a pause kept them from working."""
        for node in self._nodes.generators:
            self._engines.on_lost_weights(str(node.role), self._resync)

    def sync(self, version: int) -> float:
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._changed:
            self._num_pauses += 1
            self._interrupt_generation()
            self._wait_until(lambda: not self._is_generating)
        self._wait_for_judges()
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._excused += time.perf_counter() - start
                self._changed.notify_all()

    def save(self, folder: Path) -> None:
        with self.paused():
            super().save(folder)

    def close(self) -> None:
        """End the thread, or leave it to end when its engines stop."""
        with self._changed:
            self._is_closing = True
            self._interrupt_generation()
            self._changed.notify_all()
        super().close()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _complete(self, step: int) -> None:
        with self._changed:
            self._seconds["train_idle"] += self._wait_until(lambda: self._admission.is_complete(step))
            self._is_training = True

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
        before = self._seconds["copy"]
        super()._copy()
        self._excused += self._seconds["copy"] - before

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
                # Steps that must not be interrupted are generated one by one.
                self._generate(steps[:1] if self._overlap.in_flight == "wait" else steps)
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
        if self._overlap.in_flight == "keep" and not self._interrupt.done():
            self._interrupt.set_result(None)
