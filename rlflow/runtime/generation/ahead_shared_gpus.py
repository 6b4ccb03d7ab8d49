"""Generation ahead of training on the GPUs that also train: the two take turns.

A step whose samples are complete trains at once. Otherwise the engines get the newest weights and generate, together
with this step, all later steps that these weights may generate.

How such a turn ends is the recipe's ``overlap.in_flight``. ``wait``: when all samples of these steps are finished, so
that the next steps train without a turn. ``keep``: when this step is complete. Engines that would be idle beside its
longest responses have started later steps, and a later turn resumes what they have not finished.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from rlflow.runtime.generation.ahead import AheadGeneration


class AheadOnSharedGpus(AheadGeneration):
    """Generation within ``run``, before the rest of a step."""

    def sync(self, version: int) -> float:
        with self._changed:
            self._admission.step_trained(version)
            if not self._admission.is_complete(version):
                self._load()
            return self._take("copy")

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._changed:
            if self._admission.has_new_weights:
                self._load()
        self._wait_for_judges()
        yield

    def _complete(self, step: int) -> None:
        if not self._admission.is_complete(step):
            self._interrupt = Future()
            self._generate(self._admission.admitted())

    def _note_complete(self, step: int) -> None:
        super()._note_complete(step)
        if step == self._admission.trained:
            self._interrupt.set_result(None)

    def _note_judged(self, seconds: float) -> None:
        """Note the time in which neither side works."""
        for side in ("train_idle", "generate_idle"):
            self._seconds[side] += seconds
