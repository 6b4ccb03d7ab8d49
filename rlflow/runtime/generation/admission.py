"""A pure rule for generation ahead of training: which steps may start, and when new weights may be loaded.

Version v of the policy is the one that v steps have trained, so step s trains version s. A step starts only with a
version of at least s - ``max_staleness``, and versions never fall, so no token of it can be older. Nothing else bounds
the staleness: not the speed of any worker, nor which of them fails.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Rollouts
from rlflow.resources.workload import Overlap


@dataclass
class Admission:
    """The versions and steps of a run, without threads and without a clock."""

    overlap: Overlap
    num_steps: int
    trained: int = 0
    """The newest version: the number of trained steps, which is also the next step to train."""
    version: int = 0
    """The version that the generating engines have."""
    _complete: set[int] = field(default_factory=set)
    """The steps that are generated and not trained yet."""

    def admitted(self) -> list[int]:
        """Return the steps that may be generated now, in ascending order: admitted and not complete."""
        end = min(self.version + self.overlap.max_staleness + 1, self.num_steps)
        return [step for step in range(self.trained, end) if step not in self._complete]

    def is_complete(self, step: int) -> bool:
        """Return whether all samples of a step are generated."""
        return step in self._complete

    def completed(self, step: int) -> None:
        """Note that all samples of a step are generated."""
        self._complete.add(step)

    def step_trained(self, version: int) -> None:
        """Note that the policy has a new version: all steps before it are trained."""
        assert version >= self.trained
        self.trained = version
        self._complete = {step for step in self._complete if step >= version}

    @property
    def has_new_weights(self) -> bool:
        """Return whether the engines lack the newest version."""
        return self.trained > self.version

    @property
    def may_load(self) -> bool:
        """Return whether the newest version may replace the one of the engines, while they generate nothing.

        With ``deterministic`` the older version must first generate all steps that it may, which is one in general.
        """
        return not self.overlap.deterministic or not self.admitted()

    def loaded(self) -> None:
        """Note that the engines have the newest version."""
        self.version = self.trained

    def staleness(self, step: int, rollouts: Rollouts) -> NDArray[np.int64]:
        """Return the number of tokens by how many versions older their policy is, from 0 to ``max_staleness``."""
        versions = rollouts.versions
        counts = np.bincount(step - versions.run_values.astype(np.int64), versions.run_lengths)
        assert len(counts) <= self.overlap.max_staleness + 1, (
            f"step {step} has tokens of version {step - len(counts) + 1}"
        )
        return np.pad(counts.astype(np.int64), (0, self.overlap.max_staleness + 1 - len(counts)))
