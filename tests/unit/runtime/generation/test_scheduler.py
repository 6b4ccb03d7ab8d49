"""The scheduler assigns every sample exactly once, the longest first, and no more than fit."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlflow.engines.base import Sampling
from rlflow.runtime.generation.engine_state import Capacity
from rlflow.runtime.generation.length_model import LengthModel
from rlflow.runtime.generation.scheduler import Scheduler

Ints = NDArray[np.int64]
GROUP = 4
SAMPLING = Sampling(max_tokens=100, group_size=4)


def drain(
    scheduler: Scheduler, lengths: Ints, ranks: int, lose: Mapping[int, int] | None = None
) -> tuple[dict[int, int], list[int]]:
    """Simulate engines that generate a token of each sample in a step, and report each finished sample.

    Returns the engine that finished each sample, and the order in which samples started. ``lose`` gives engines the
    number of events after which they fail, with the samples that they have preempted.
    """
    begun: list[int] = []
    running: dict[int, dict[int, int]] = {rank: {} for rank in range(ranks)}
    written = np.zeros(len(lengths), np.int64)
    handed_over: dict[int, int] = {}
    lose = dict(lose or {})
    steps = dict.fromkeys(running, 0)

    def begin() -> None:
        for rank, rows in scheduler.assign().items():
            begun.extend(row for row in rows if not written[row])
            running[rank] |= {row: steps[rank] - int(written[row]) for row in rows}

    begin()
    by: dict[int, int] = {}
    events = 0
    while any(running.values()):
        ends = {
            rank: min((since + int(lengths[row]), row) for row, since in rows.items())
            for rank, rows in running.items()
            if rows
        }
        rank = min(ends, key=lambda rank: ends[rank])
        steps[rank], row = ends[rank]
        events += 1
        if rank in lose and events >= lose[rank]:
            running.pop(rank)
            by = {row: of for row, of in by.items() if of != rank}
            for row in [row for row, of in handed_over.items() if of == rank]:
                handed_over.pop(row)
                written[row] = 0
            scheduler.engine_failed(rank, written)
            begin()
            continue
        assert row not in by
        by[row] = rank
        running[rank].pop(row)
        scheduler.finished(rank, [row], [int(lengths[row])], steps[rank])
        of, rows = scheduler.preempt(rank)
        for each in rows:
            written[each] = steps[of] - running[of].pop(each)
            handed_over[each] = of
        if rows:
            scheduler.preempted(of, rows, written[rows].tolist())
        begin()
    return by, begun


def scheduler(prompts: int, ranks: int, max_tokens: int, room: Capacity, before: Ints | None = None) -> Scheduler:
    expected = None if before is None else before.astype(np.float64)
    sampling = Sampling(max_tokens=max_tokens, group_size=GROUP)
    return Scheduler(np.full(prompts, 5), sampling, dict.fromkeys(range(ranks), room), previous_lengths=expected)


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40).map(lambda drawn: np.repeat(drawn, GROUP)),
    ranks=st.integers(1, 5),
    sequences=st.integers(1, 20),
    tokens=st.integers(55, 1000),
    lose=st.dictionaries(st.integers(1, 4), st.integers(1, 60)),
)
def test_every_sample_is_generated_once(
    lengths: Ints, ranks: int, sequences: int, tokens: int, lose: Mapping[int, int]
) -> None:
    """Whatever room there is and whichever engines fail, as long as one is left; and the same again."""

    def run() -> tuple[dict[int, int], list[int]]:
        made = scheduler(len(lengths) // GROUP, ranks, 50, Capacity(sequences, tokens))
        done = drain(made, lengths, ranks, {rank: at for rank, at in lose.items() if rank < ranks})
        assert (made.num_queued, sum(len(made.running_rows(rank)) for rank in made.ranks)) == (0, 0)
        assert sorted(row for rank in made.ranks for row in made.finished_rows(rank)) == list(range(len(lengths)))
        return done

    written, begun = run()
    assert sorted(written) == list(range(len(lengths)))
    assert run() == (written, begun)


def drawn(alike: float, limit: int, num_groups: int, seed: int) -> NDArray[np.float64]:
    """Draw log-normal lengths, of whose variance the group has the share ``alike``."""
    rng = np.random.default_rng(seed)
    of_group = np.repeat(rng.standard_normal(num_groups), GROUP)
    scores = alike**0.5 * of_group + (1 - alike) ** 0.5 * rng.standard_normal(len(of_group))
    lengths: NDArray[np.float64] = np.clip(np.ceil(1200 * np.exp(0.9 * scores)), 1, limit)
    return lengths


def test_one_of_each_group_comes_first_and_then_the_longest() -> None:
    group_lengths = np.random.default_rng(0).permutation(np.arange(1, 41) * 10)
    lengths = np.repeat(group_lengths, GROUP)
    _, begun = drain(scheduler(40, 2, 500, Capacity(8, 10**6)), lengths, 2)
    assert sorted(row // GROUP for row in begun[:40]) == list(range(40))
    ranks = np.argsort(np.argsort(group_lengths[np.array(begun[40:]) // GROUP]))
    assert np.corrcoef(ranks, -np.arange(len(ranks)))[0, 1] > 0.8


def test_a_full_cache_preempts_the_longest_samples() -> None:
    """The cache has 110 tokens. Four samples of 5 + 20 leave too few for 10 more each, and three do not."""
    made = scheduler(1, 1, 100, Capacity(8, 110))
    assert made.assign() == {0: [0, 1, 2, 3]}
    made.finished(0, [], [], 10)
    assert made.preempt(0) == (0, [])
    made.finished(0, [], [], 20)
    assert made.preempt(0) == (0, [0])
    made.preempted(0, [0], [20])
    assert (made.num_queued, made.assign()) == (1, {}), "it has no room to go on"
    made.finished(0, [1], [21], 21)
    assert made.assign() == {0: [0]}


def test_interrupted_samples_resume_on_the_engine_that_has_them() -> None:
    """Row 1 has finished since; the others are new, and go to the engine with the smaller load."""
    rooms = {0: Capacity(4, 200), 1: Capacity(4, 200, np.array([1, 2], np.int32).tobytes())}
    lengths = np.array([0, 9, 30, 0])
    made = Scheduler(np.full(1, 5), SAMPLING, rooms, rows=np.array([0, 2, 3]), initial_lengths=lengths)
    assert made.assign() == {1: [2], 0: [0, 3]}
    assert made.assign() == {}


def test_preempted_samples_resume_where_there_is_room() -> None:
    made = scheduler(1, 2, 100, Capacity(4, 110))
    assert made.assign() == {0: [0, 2], 1: [1, 3]}
    made.finished(0, [], [], 40)
    made.finished(1, [], [], 5)
    assert made.preempt(0) == (0, [0])
    made.preempted(0, [0], [40])
    assert made.assign() == {1: [0]}
    made.finished(1, [], [], 25)
    assert made.preempt(1) == (1, [0]), "which has most written, not the one that came last"
    made.preempted(1, [0], [60])
    made.finished(1, [1, 3], [25, 25], 25)
    assert made.assign() == {1: [0]}


def test_the_shortest_preempted_sample_resumes_first() -> None:
    made = scheduler(1, 1, 100, Capacity(1, 1000))
    for row, written in ((0, 30), (1, 50), (2, 10), (3, 20)):
        assert made.assign() == {0: [row]}
        made.preempted(0, [row], [written])
    order = []
    for _ in range(4):
        order += made.assign()[0]
        made.finished(0, order[-1:], [60], 0)
    assert order == [2, 3, 0, 1]


def test_earlier_steps_start_first_and_leave_last() -> None:
    """Groups of step 7 are rows 0 to 3 and 8 to 11; with room for ten, two samples of step 8 fill the rest."""
    made = Scheduler(np.array([5, 5, 5]), SAMPLING, {0: Capacity(10, 280)}, steps=np.array([7, 8, 7]))
    rows = made.assign()[0]
    assert sorted(rows[:8]) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert all(4 <= row < 8 for row in rows[8:])
    made.finished(0, [], [], 19)
    # Ten samples of 5 + 19 tokens leave too few for 19 more of each, and so do all but six of them.
    _, leaving = made.preempt(0)
    assert sorted(leaving[:2]) == sorted(rows[8:])
    assert len(leaving) == 4


def test_the_fullest_hands_over_to_the_emptiest() -> None:
    made = scheduler(2, 2, 100, Capacity(8, 400))
    assert made.assign() == {0: [0, 5, 2, 7], 1: [4, 1, 6, 3]}
    made.finished(0, [], [], 20)
    made.finished(1, [], [], 20)
    assert made.preempt(1) == (1, []), "both hold as much"
    made.finished(1, [4, 1, 6], [20] * 3, 20)
    # An earlier row was too long for it. The migrating one must not return to the engine that it leaves.
    made._engines[1].may_have_room = False
    assert made.preempt(1) == (0, [0]), "100 and 25 tokens: with one of 25 handed over, 75 and 50"
    assert made.preempt(1) == (0, []), "it is asked already"
    made.preempted(0, [0], [20])
    assert made.assign() == {1: [0]}


def test_samples_near_their_limit_do_not_migrate() -> None:
    made = scheduler(2, 2, 100, Capacity(8, 1000))
    made.assign()
    made.finished(0, [], [], 90)
    made.finished(1, [4, 1, 6], [20] * 3, 20)
    assert made.preempt(1) == (0, [])


@pytest.mark.parametrize("draw", [lambda rng: rng.exponential(60, 400), lambda rng: rng.normal(300, 30, 400)])
def test_the_cache_is_filled_and_does_not_overflow(draw: Callable[[np.random.Generator], NDArray[np.float64]]) -> None:
    room, limit = Capacity(10**6, 12_000), 400
    lengths = np.clip(draw(np.random.default_rng(0)), 1, limit).astype(np.int64)
    made = scheduler(100, 1, limit, room)
    held: list[int] = []
    running: dict[int, int] = {}
    written = np.zeros(len(lengths), np.int64)
    steps = 0
    rows = made.assign()[0]
    while rows or running:
        running |= {row: steps - int(written[row]) for row in rows}
        steps += 1
        ended = [row for row, since in running.items() if steps - since == lengths[row]]
        held.append(sum(5 + steps - since for since in running.values()))
        for row in ended:
            running.pop(row)
        made.finished(0, ended, lengths[ended].tolist(), steps)
        _, off = made.preempt(0)
        for row in off:
            written[row] = steps - running.pop(row)
        if off:
            made.preempted(0, off, written[off].tolist())
        rows = made.assign().get(0, [])
    assert max(held) <= room.tokens
    assert np.mean(held[: len(held) // 2]) > 0.6 * room.tokens


def test_the_only_sample_of_an_engine_is_never_preempted() -> None:
    made = scheduler(1, 1, 100, Capacity(8, 9))
    assert made.assign() == {0: [0]}
    made.finished(0, [], [], 50)
    assert made.preempt(0) == (0, [])


class TestExpectation:
    def learned(self, tokens: list[float], done: list[bool]) -> LengthModel:
        """Return a model of groups with one sample each."""
        made = LengthModel(np.arange(len(tokens)), 100)
        made.update(np.arange(len(tokens)), np.array(tokens), np.array(done))
        return made

    def test_running_samples_are_expected_to_be_longer_than_finished_ones(self) -> None:
        factors = self.learned([10, 50, 50, 100], [True, True, False, True]).factors
        assert factors[0] > factors[1] > factors[2] > factors[3]

    def test_how_much_groups_differ_is_measured(self) -> None:
        """The factors of groups that do not differ come near each other."""

        def spread(alike: float) -> float:
            lengths = drawn(alike, 8000, 200, seed=0)
            rows = np.arange(len(lengths))
            made = LengthModel(rows // GROUP, 8000, lengths)
            made.update(rows, lengths, np.ones(len(lengths), np.bool_))
            return float(np.log(made.factors).std())

        assert 3 * spread(0.0) < spread(0.7)

    def test_equal_lengths(self) -> None:
        """All responses end at the same length, so the hazard there is as high as possible, but finite."""
        lengths = np.full(64, 300.0)
        made = LengthModel(np.arange(64) // GROUP, 400, lengths)
        for _ in range(50):
            made.update(np.arange(64), lengths, np.ones(64, np.bool_))
        assert np.isfinite(made.factors).all()
        assert made.factors.tolist() == pytest.approx([1.0] * 16, rel=0.2)


def test_what_ended_in_an_earlier_step_tells_of_its_group() -> None:
    """Two groups have one unfinished sample each. Both hazards are above the initial one, and that of the group with
    short responses is higher.
    """
    done = np.array([5, 5, 5, 0, 90, 90, 90, 0])
    made = Scheduler(np.array([1, 1]), SAMPLING, {0: Capacity(8, 10_000)}, rows=np.array([3, 7]), initial_lengths=done)
    short, long = made._length_model.factors
    assert short > long > 1


def test_an_engine_holds_the_next_samples_until_its_report_is_answered() -> None:
    made = scheduler(200, 1, 100, Capacity(64, 10**6))
    rows = made.assign()[0]
    assert len(rows) == 66
    assert made.assign() == {}
    made.finished(0, rows[:2], [5, 5], 5)
    assert len(made.assign()[0]) == 2
