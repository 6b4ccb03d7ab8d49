"""The steps that may be generated with a version, under random schedules without threads."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.batch import Repeated
from rlflow.resources.workload import Overlap
from rlflow.runtime.generation.admission import Admission
from tests.helpers import rollouts, sequences

STEPS = 12


@dataclass
class Play:
    """A run whose two sides take turns at random. Each sample of a step has up to four tokens."""

    admission: Admission
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The versions of the tokens of each step."""
    sides: list[str] = field(default_factory=list)

    def generate(self, choice: int) -> bool:
        """Generate a token of one of the admitted steps; a step with four tokens is complete."""
        admitted = self.admission.admitted()
        if not admitted:
            return False
        keeps = self.admission.overlap.in_flight == "keep"
        step = admitted[choice % len(admitted)] if keeps else admitted[0]
        self.tokens[step].append(self.admission.version)
        if len(self.tokens[step]) == 4:
            self.admission.completed(step)
        return True

    def fail(self, choice: int) -> bool:
        """Lose all tokens of one step that is not complete."""
        lost = [step for step in self.tokens if not self.admission.is_complete(step) and step >= self.admission.trained]
        if lost:
            self.tokens[lost[choice % len(lost)]].clear()
        return False

    def train(self, choice: int) -> bool:
        """Train the next step, if it is complete and the older version has generated what it must."""
        step = self.admission.trained
        waits = self.admission.overlap.deterministic and self.admission.has_new_weights
        if step == STEPS or waits or not self.admission.is_complete(step):
            return False
        self.admission.step_trained(step + 1)
        return True

    def load(self, choice: int) -> bool:
        """Load the newest weights; where weights wait, only between two steps."""
        is_between = all(len(self.tokens[step]) in (0, 4) for step in list(self.tokens))
        if not self.admission.has_new_weights or not self.admission.may_load:
            return False
        if self.admission.overlap.in_flight == "wait" and not is_between:
            return False
        self.admission.loaded()
        return True


MOVES = st.lists(st.tuples(st.sampled_from(["generate", "fail", "train", "load"]), st.integers(0, 9)), max_size=60)
OVERLAPS = st.builds(
    lambda k, flags: Overlap(max_staleness=k, in_flight=flags[0], deterministic=flags[1]),
    st.integers(1, 4),
    st.sampled_from([("wait", True), ("wait", False), ("keep", False)]),
)


@pytest.mark.slow
@given(overlap=OVERLAPS, moves=MOVES)
@settings(max_examples=200)
def test_no_schedule_makes_a_token_too_old_and_every_run_ends(overlap: Overlap, moves: list[tuple[str, int]]) -> None:
    play = Play(Admission(overlap, STEPS))
    for move, choice in moves:
        getattr(play, move)(choice)
    # Whatever happened before, the run can be finished.
    while play.admission.trained < STEPS:
        assert play.train(0) or play.load(0) or play.generate(0), "nothing can go on"
    for step in range(STEPS):
        versions = play.tokens[step]
        assert len(versions) == 4
        assert all(0 <= step - version <= overlap.max_staleness for version in versions)
        if overlap.deterministic:
            assert versions == [max(0, step - overlap.max_staleness)] * 4


def test_the_histogram_counts_tokens_by_age() -> None:
    out = rollouts(sequences((2, 2), ((3,), (2,))))
    versions = Repeated(np.array([3, 4, 5], np.int32), np.array([1, 2, 2]), np.array([2, 1]))
    object.__setattr__(out, "versions", versions)
    admission = Admission(Overlap(max_staleness=3), STEPS)
    assert admission.staleness(5, out).tolist() == [2, 2, 1, 0]
    with pytest.raises(AssertionError, match="step 8 has tokens of version 3"):
        admission.staleness(8, out)
