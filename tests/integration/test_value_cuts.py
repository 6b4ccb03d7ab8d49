"""A critic's minibatch, cut in many ways: its gradient is the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Metrics, Minibatch
from rlflow.nodes.critic import ValueLoss
from rlflow.nodes.minibatches import Weighting
from tests.helpers import minibatch
from tests.integration.engine_process import EngineProcess, all_of, free_address
from tests.integration.test_cuts import (
    BACKWARDS,
    GIVEN,
    SCATTERED,
    Cut,
    Gradients,
    all_and_none,
    build,
    compare,
    evenly,
    gradients,
    plain,
    spec_of,
    ten_and_one,
)

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Critic:
    """A value function in place of a policy's node."""

    clip_eps: float = 0.3

    def loss(self, temperature: float) -> ValueLoss:
        return ValueLoss(clip_eps=self.clip_eps)


def batch() -> Minibatch:
    draw = np.random.default_rng(0)
    old, returns = draw.normal(0, 0.5, (2, len(GIVEN.response_ids.values)))
    weights = Weighting().weights(GIVEN.response_ids.lengths, np.ones(len(GIVEN), np.bool_), GIVEN.keys[:, :2])
    return replace(minibatch(GIVEN, 0, old_values=old, returns=returns), weights=weights)


def valued(stage: int | None, sequence_parallel_size: int, rank: int = 0, ranks: int = 1, address: str = "") -> Any:
    of = spec_of(stage, sequence_parallel_size, rank, ranks, address)
    return replace(of, role="critic", capabilities=frozenset({"Trains", "Values"}))


def whole(*given: Any) -> tuple[Gradients, Metrics]:
    return gradients(*given)


@cache
def expected() -> tuple[Gradients, Metrics]:
    """Return the gradients of the whole minibatch in one pass."""
    return whole([plain(valued(None, 1))], 0, batch(), 4096, Critic())


def test_it_clips() -> None:
    """Else it would say less than it seems to."""
    assert 0.1 < expected()[1].values["clip_fraction"] < 0.9


@pytest.mark.parametrize("cut", [Cut(40), Cut(1), Cut(4096, order=BACKWARDS), Cut(22, order=SCATTERED)], ids=str)
def test_on_one_rank(cut: Cut) -> None:
    given = batch() if cut.order is None else batch().take(cut.order)
    compare(whole([plain(valued(None, 1))], 0, given, cut.tokens, Critic()), expected())


@pytest.mark.parametrize(
    "cut",
    [
        *(Cut(4096), Cut(22), Cut(40, 0, evenly), Cut(22, 1, ten_and_one), Cut(40, 2, all_and_none)),
        *(Cut(4096, 3, evenly), Cut(40, 3, evenly, SCATTERED), Cut(1, 3, all_and_none), Cut(40, 3)),
    ],
    ids=str,
)
def test_on_two_ranks(cut: Cut, two: Sequence[EngineProcess]) -> None:
    given = batch() if cut.order is None else batch().take(cut.order)
    parts, size = ([given] * 2, 2) if cut.split is None else (cut.split(given), 1)
    address = free_address()
    places = all_of(two, build, [valued(cut.stage, size, rank, 2, address) for rank in range(2)])
    for ours in all_of(two, whole, places, parts, [cut.tokens] * 2, [Critic()] * 2):
        compare(ours, expected())
