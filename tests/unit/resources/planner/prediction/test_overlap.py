"""Steps that generate ahead of training, against schedules worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from rlflow.resources.planner.prediction.overlap import Decoding, alone_seconds, simulate_overlap, simulate_turns
from rlflow.resources.workload import Ahead, Overlap
from tests.unit.resources.planner.planning import simulate
from tests.unit.resources.planner.test_simulate import GRPO, SECONDS

# 128 samples of 100 tokens at 0.1 s a step, all at once: 10 s.
EQUAL = Decoding(
    samples=128, slots=128, lengths=(100.0,), token_seconds=lambda running: 0.1, prefill=0.0, prefill_token=0.0
)
# Half of the samples take 2.5 s, the others 7.5 s, in 64 slots: at least 10 s.
UNEVEN = replace(EQUAL, slots=64, lengths=(50.0, 150.0), token_seconds=lambda running: 0.05)
KEEP: dict[str, Any] = {"in_flight": "keep", "deterministic": False}


def step(decoding: Decoding, train: float, sync: float = 0.0, **options: Any) -> float:
    return simulate_overlap(decoding, train, sync, Overlap(**options)).step_seconds


def test_in_the_schedule_both_begin_together_and_the_sync_waits_for_both() -> None:
    workload = replace(GRPO, ahead=Ahead(nodes=("rollout",), overlap=Overlap(max_staleness=1)))
    schedule = simulate(workload, SECONDS, {"rollout": 0, "reference": 1, "actor": 1})
    assert {span.node: (span.start, span.end) for span in schedule.spans} == {
        "rollout": (0, 10),
        "reference": (0, 4),
        "actor": (4, 12),
        "actor->rollout": (12, 13),
    }
    assert schedule.idle_share(0) == pytest.approx(2 / 13)


@pytest.mark.parametrize(("train", "synchronous", "ahead"), [(4.0, 15.0, 11.0), (10.0, 21.0, 11.0), (16.0, 27.0, 17.0)])
def test_equal_responses_overlap_completely(train: float, synchronous: float, ahead: float) -> None:
    assert alone_seconds(EQUAL) == pytest.approx(10)
    assert step(EQUAL, train, 1.0, max_staleness=0) == pytest.approx(synchronous)
    for staleness in (1, 2, 4):
        assert step(EQUAL, train, 1.0, max_staleness=staleness) == pytest.approx(ahead)


def test_the_idle_share_is_what_the_shorter_side_waits() -> None:
    times = simulate_overlap(EQUAL, 4.0, 1.0, Overlap(max_staleness=1))
    assert times.train_idle == pytest.approx(6 / 11, abs=0.01)
    assert times.generate_idle == pytest.approx(0, abs=0.01)
    assert times.staleness == 1


def test_the_next_step_fills_the_end_of_this_one() -> None:
    """Alone, some slot has two long samples one after the other, and most slots are empty by then."""
    assert alone_seconds(UNEVEN) == pytest.approx(15, rel=0.02)
    assert step(UNEVEN, 1.0, max_staleness=1) == pytest.approx(15, rel=0.02)
    assert step(UNEVEN, 1.0, max_staleness=4, **KEEP) == pytest.approx(10, rel=0.03)


def test_reading_partial_rollouts_again_takes_time() -> None:
    slower = replace(UNEVEN, prefill_token=1e-3)
    assert step(slower, 1.0, max_staleness=4, **KEEP) > 1.1 * step(UNEVEN, 1.0, max_staleness=4, **KEEP)


def test_judging_delays_a_step_that_waits_and_not_one_that_streams() -> None:
    judged = replace(EQUAL, judging=2.0)
    assert step(judged, 4.0, max_staleness=1) == pytest.approx(12)
    assert step(judged, 4.0, max_staleness=2, **KEEP) == pytest.approx(10, rel=0.02)


def test_no_step_is_older_than_the_bound() -> None:
    for staleness in (1, 3):
        for options in (KEEP, {}, {"deterministic": False}):
            times = simulate_overlap(UNEVEN, 6.0, 0.5, Overlap(max_staleness=staleness, **options))
            assert times.staleness <= staleness


def turns(decoding: Decoding, train: float, sync: float = 0.0, **options: Any) -> float:
    return simulate_turns(decoding, train, sync, Overlap(**options)).step_seconds


def test_in_the_schedule_shared_gpus_work_one_after_another() -> None:
    workload = replace(GRPO, ahead=Ahead(nodes=("rollout",), overlap=Overlap(max_staleness=1)))
    schedule = simulate(workload, SECONDS, {"rollout": 0, "reference": 0, "actor": 0})
    assert schedule == simulate(GRPO, SECONDS, {"rollout": 0, "reference": 0, "actor": 0})


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_steps_of_a_turn_share_its_weight_sync(staleness: int) -> None:
    """Every slot is in use at all times, so nothing else changes."""
    assert turns(EQUAL, 4.0, 3.0, max_staleness=staleness) == pytest.approx(10 + 4 + 3 / (staleness + 1))
    assert turns(EQUAL, 4.0, 3.0, max_staleness=staleness, **KEEP) == pytest.approx(17)


def test_steps_of_a_turn_decode_together_where_there_is_room() -> None:
    """A decoding step takes 0.1 s for any number of samples: two steps are as fast as one."""
    roomy = replace(EQUAL, slots=256)
    times = simulate_turns(roomy, 4.0, 0.0, Overlap(max_staleness=1))
    assert times.step_seconds == pytest.approx(10 / 2 + 4)
    assert times.staleness == 0.5


def test_later_steps_fill_the_end_of_a_turn() -> None:
    """Alone, half of the places are empty at the end; with others to generate, nearly none (10 s of work)."""
    alone = turns(UNEVEN, 1.0, max_staleness=0)
    assert alone == pytest.approx(16, rel=0.02)
    for options in ({}, KEEP):
        assert turns(UNEVEN, 1.0, max_staleness=4, **options) == pytest.approx(11, rel=0.1)


def test_no_step_of_a_turn_is_older_than_the_bound() -> None:
    for staleness in (1, 3):
        assert simulate_turns(UNEVEN, 6.0, 0.5, Overlap(max_staleness=staleness)).staleness == staleness / 2
        assert simulate_turns(UNEVEN, 6.0, 0.5, Overlap(max_staleness=staleness, **KEEP)).staleness <= staleness
