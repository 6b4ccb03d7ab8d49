"""The ideal schedules that benchmarks/conversations.py compares with, on cases that can be done by hand."""

import numpy as np
import pytest

from benchmarks import agents, conversations
from benchmarks.paced_engine import SLOTS, token_seconds
from benchmarks.turn_schedule import bound, lock_step, simulate


def each_second(running: float) -> float:
    return 1.0


def shared(running: float) -> float:
    return running


def test_turns_alternate_with_answers() -> None:
    """10 + 5, and 20 + 7: one conversation alone."""
    tokens, delays = np.array([[10.0, 20.0]]), np.array([[5.0, 7.0]])
    for schedule in (simulate, lock_step, bound):
        assert schedule(tokens, delays, 1, 4, each_second) == pytest.approx(42.0)


def test_a_slot_is_used_while_another_conversation_waits() -> None:
    """One slot: 0 to 10 the first, to 20 the second, whose answer comes at 21; the first is back at 15, waits to 20."""
    tokens, delays = np.array([[10.0, 10.0], [10.0, 10.0]]), np.array([[5.0, 1.0], [1.0, 2.0]])
    assert simulate(tokens, delays, 1, 1, each_second) == pytest.approx(42.0)
    # 20 + 5, and 20 + 2: each turn waits for all.
    assert lock_step(tokens, delays, 1, 1, each_second) == pytest.approx(47.0)
    assert bound(tokens, delays, 1, 1, each_second) == pytest.approx(40.0)


def test_an_engine_is_faster_with_fewer_turns() -> None:
    """Together 4 tokens in 8 s, then the longer turn alone; on two engines neither slows the other."""
    tokens, none = np.array([[4.0], [6.0]]), np.zeros((2, 1))
    assert simulate(tokens, none, 1, 2, shared) == pytest.approx(10.0)
    assert simulate(tokens, none, 2, 1, shared) == pytest.approx(6.0)


@pytest.mark.parametrize("episodes", [512, 1024])
def test_a_plan_predicts_the_ideal_schedule(episodes: int) -> None:
    """Waits decide with few episodes, and take no time with many."""
    predicted = agents.plan_of_route("tokens", episodes).prediction.nodes["rollouts"].seconds
    lengths = np.random.default_rng(1).choice(conversations.TurnGenerator.lengths, (episodes, conversations.TURNS))
    ideal = simulate(np.ceil(lengths), agents.delays_of(episodes), conversations.ENGINES, SLOTS, token_seconds)
    assert predicted == pytest.approx(ideal, rel=0.06)
