"""Generation over engines that take new samples while they write: here threads of this process."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.fake import FakeEngine
from rlflow.engines.group_progress import PartialResponse
from rlflow.errors import EngineError
from rlflow.runtime.generation.engine_group import EngineGroup, slow_engines, summarize_activity
from tests.helpers import WritingEngine, prompts, spec
from tests.stepwise import MAX_TOKENS, Stepwise, response
from tests.stepwise import Dying as StepwiseDying
from tests.unit.runtime.ray.test_role_proxy import Threads

SAMPLING = Sampling(max_tokens=4, group_size=3)
GIVEN = prompts(tuple(range(2, 22)))


def no_weights() -> None:
    raise AssertionError("these engines follow nobody")


def writing_of(workers: Threads, renew: Callable[[], None] = no_weights) -> EngineGroup:
    return EngineGroup("rollout", workers, renew)


def check(out: Rollouts) -> None:
    alone = FakeEngine(spec()).generate(GIVEN, SAMPLING)
    assert out.keys.tolist() == alone.keys.tolist()
    assert out.response_ids.values.tolist() == alone.response_ids.values.tolist()
    assert tuple(out.texts) == tuple(alone.texts)


class Held(WritingEngine):
    """Does not finish prompt 0 before it is told that all others are done, on whatever engine."""

    left = 0
    done = threading.Event()

    def response(self, sample: Prompts, sampling: Sampling) -> "Future[Any]":
        if sample.keys[0, 1] > 0:
            Held.left -= 1
            if Held.left == 0:
                Held.done.set()
            return super().response(sample, sampling)
        late: Future[Any] = Future()

        def finish() -> None:
            assert Held.done.wait(60)
            late.set_result(super(Held, self).response(sample, sampling).result())

        threading.Thread(target=finish, daemon=True).start()
        return late


def test_no_sample_waits_behind_a_long_one() -> None:
    """An engine with all but one of its places taken for long goes on, and so do the others, or this hangs."""
    Held.left, Held.done = (len(GIVEN) - 1) * SAMPLING.group_size, threading.Event()
    check(writing_of(Threads([Held(spec()) for _ in range(2)])).generate(GIVEN, SAMPLING))


def test_samples_go_out_in_few_messages() -> None:
    workers = Threads([WritingEngine(spec(), (64, 10_000)) for _ in range(2)])
    check(writing_of(workers).generate(GIVEN, SAMPLING))
    methods = ("begin_session", "advance", "finish_session", "take_activity")
    assert [method for _, method in workers.calls] == [method for method in methods for _ in range(2)]
    assert [sum(map(len, engine.given)) for engine in workers.engines] == [30, 30]


@pytest.mark.slow
def test_many_samples_take_a_message_for_each_load_of_an_engine() -> None:
    """1,024 samples on engines that finish 32 at once: 32 messages, and three for each engine at start and end."""
    workers = Threads([WritingEngine(spec(), (32, 100_000)) for _ in range(2)])
    out = writing_of(workers).generate(prompts((3,) * 128), Sampling(max_tokens=4, group_size=8))
    assert len(out) == 1024
    assert len(workers.calls) == 32 + 2 * 3


class Dying(WritingEngine):
    """Fails when it is given samples for the ``at``-th time, or hands over what it has written."""

    at: int | None = 2

    def submit(
        self, samples: Prompts, sampling: Sampling, begun: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        if len(self.given) == self.at:
            raise EngineError("it died")
        return super().submit(samples, sampling, begun)

    def finish_session(self) -> Rollouts | None:
        if self.at is None:
            raise EngineError("it died at the end")
        return super().finish_session()


class DyingAtTheEnd(Dying):
    at = None


@pytest.mark.parametrize("kind", [Dying, DyingAtTheEnd])
@pytest.mark.parametrize("room", [4, 100])
def test_the_samples_of_an_engine_that_fails_go_to_the_others(kind: type[Dying], room: int) -> None:
    class Here(kind):  # type: ignore[misc,valid-type]
        at = 0 if room == 100 and kind is Dying else kind.at

    workers = Threads([WritingEngine(spec(), (room, 10_000)), Here(spec(), (room, 10_000))])
    writing = writing_of(workers)
    writing.weights_synced()
    check(writing.generate(GIVEN, SAMPLING))
    # The new engine writes nothing before it has the weights.
    check(writing.generate(GIVEN, SAMPLING))
    assert workers.engines[1].given == []
    writing.weights_synced()
    workers.engines[1].at = 99
    check(writing.generate(GIVEN, SAMPLING))
    assert workers.engines[1].given


class Sloppy(WritingEngine):
    """An engine that drops its first two rollouts and returns ``rows`` in their place."""

    rows: ClassVar[list[int]] = []

    def finish_session(self) -> Rollouts | None:
        return self._damaged(super().finish_session())

    def _damaged(self, rollouts: Rollouts | None) -> Rollouts:
        assert rollouts is not None
        return rollouts.take(np.append(np.arange(2, len(rollouts)), self.rows).astype(np.int64))


@pytest.mark.parametrize("room", [4, 100])
@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([0], "1 are missing, 0 are doubled"),
        ([0, 1, 1], "0 are missing, 1 are doubled"),
        ([0, 2], "1 are missing, 1 are"),
    ],
)
def test_an_engine_that_loses_or_doubles_a_sample_is_replaced(
    rows: list[int], reason: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sloppy, "rows", rows)
    assert reason in failure_when_replaced(Sloppy(spec(), (room, 10_000)), room)


def failure_when_replaced(engine: WritingEngine, room: int) -> str:
    """Generate with another engine and this one, which must be replaced; return what it has done wrong."""
    workers = Threads([WritingEngine(spec(), (room, 10_000)), engine])
    writing = writing_of(workers)
    check(writing.generate(GIVEN, SAMPLING))
    assert workers.engines[1] is not engine
    (line,) = writing.take_failures()
    return str(line["failed"])


class Confused(Sloppy):
    """An engine that returns a sample of another engine in place of its first one."""

    def _damaged(self, rollouts: Rollouts | None) -> Rollouts:
        assert rollouts is not None
        own = set(map(tuple, rollouts.keys.tolist()))
        keys = rollouts.keys.copy()
        keys[0] = next(key for key in GIVEN.repeat(SAMPLING.group_size).keys.tolist() if tuple(key) not in own)
        return replace(rollouts, keys=keys)


@pytest.mark.parametrize("room", [4, 100])
def test_an_engine_that_returns_a_sample_of_another_one_is_replaced(room: int) -> None:
    failure = failure_when_replaced(Confused(spec(), (room, 10_000)), room)
    assert "1 are missing, 0 are doubled, 1 are of other samples" in failure


def test_engines_that_lose_a_sample_every_time_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sloppy, "rows", [0])
    with pytest.raises(EngineError, match="1 are missing"):
        writing_of(Threads([Sloppy(spec()) for _ in range(2)])).generate(GIVEN, SAMPLING)


class Stillborn(Dying):
    at = 0


def test_when_new_engines_fail_too_it_is_an_error() -> None:
    workers = Threads([Stillborn(spec()) for _ in range(2)])
    with pytest.raises(EngineError, match="it died"):
        writing_of(workers).generate(GIVEN, SAMPLING)
    assert [method for _, method in workers.calls].count("advance") <= 2 * 3, "it is given up after the second revival"


class DyingOnce(Stillborn):
    """The first engines of a test die, and those in their places do not."""

    left = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        DyingOnce.left -= 1
        self.at = 0 if DyingOnce.left >= 0 else 99


@pytest.mark.parametrize("engines", [1, 2])
def test_when_all_have_failed_new_ones_get_the_weights_and_write_all_of_it(engines: int) -> None:
    """A single engine is replaced too, although its failure would otherwise end the run."""
    DyingOnce.left = engines
    workers = Threads([DyingOnce(spec()) for _ in range(engines)])
    dead = list(workers.engines)
    copies: list[list[bool]] = []

    def renew() -> None:
        copies.append([engine in dead for engine in workers.engines])
        writing.weights_synced()

    writing = writing_of(workers, renew)
    writing.weights_synced()
    check(writing.generate(GIVEN, SAMPLING))
    assert copies == [[False] * engines], "weights are copied once, to new engines"
    assert sorted(line["engine"] for line in writing.take_failures()) == list(range(engines))


LONG = Sampling(max_tokens=MAX_TOKENS, group_size=3)


def check_long(out: Rollouts) -> None:
    assert len(out) == len(GIVEN) * LONG.group_size
    for row, key in enumerate(out.keys):
        assert out.response_ids[row].tolist() == response(key)
        assert len(out.logprobs[row]) == len(out.versions[row]) == len(response(key))


def gone_on(engines: Sequence[Stepwise]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the engine and the key of each resumed sample."""
    return [(rank, tuple(key)) for rank, engine in enumerate(engines) for key, written in engine.begun if written]


def test_preempted_samples_resume_in_any_engine() -> None:
    """The caches have room for three of the longest samples, and for many that have just begun."""
    workers = Threads([Stepwise(spec(), (16, 150)) for _ in range(2)])
    check_long(writing_of(workers).generate(GIVEN, LONG))
    begun_by = {
        tuple(key): rank for rank, each in enumerate(workers.engines) for key, written in each.begun if not written
    }
    assert {rank == begun_by[key] for rank, key in gone_on(workers.engines)} == {True, False}


def test_every_generation_begins_anew() -> None:
    """Responses of an earlier generation do not count."""
    workers = Threads([Stepwise(spec(), (16, 600))])
    for _ in range(2):
        check_long(writing_of(workers).generate(GIVEN, LONG))
    assert gone_on(workers.engines) == []


@pytest.mark.parametrize(("when", "at"), [("preempt", 1), ("preempt", 2), ("advance", 4), ("finish_session", 1)])
def test_preempted_samples_survive_the_failure_of_an_engine(when: str, at: int) -> None:
    """Others begin again what it had written and had not handed over, or had handed over and nobody had finished."""

    class Here(StepwiseDying):
        pass

    Here.when, Here.at = when, at
    dying = Here(spec(), (16, 150))
    workers = Threads([Stepwise(spec(), (16, 150)), dying])
    check_long(writing_of(workers).generate(GIVEN, LONG))
    assert gone_on(workers.engines)
    assert workers.engines[1] is not dying


def test_activity_is_reported_once() -> None:
    writing = writing_of(Threads([WritingEngine(spec()) for _ in range(2)]))
    writing.generate(GIVEN, SAMPLING)
    lines = writing.take_activity()
    assert [(line["role"], line["engine"], line["tokens"]) for line in lines] == [
        ("rollout", 0, 10),
        ("rollout", 1, 10),
    ]
    assert writing.take_activity() == []
    lines[1] |= {"seconds": 0.25, "cache": 0.75, "preemptions": 2}
    assert summarize_activity(lines) == {
        "engines/tokens_per_second": 16.0,
        "engines/idle": 0.375,
        "engines/idle_most": 0.75,
        "engines/last": 0,
        "engines/cache_most": 0.75,
        "engines/preemptions": 2,
    }
    assert summarize_activity([]) == {}


def seconds_of(engine: int, count: int, running: int, tokens: int) -> list[dict[str, Any]]:
    return [{"engine": engine, "seconds": 1.0, "running": running, "tokens": tokens}] * count


def test_a_slow_engine_shows_in_its_decoding_steps() -> None:
    """A decoding step takes 10 ms on two engines, with 10 samples and with 2, and 200 ms on the third."""
    lines = [*seconds_of(0, 4, 10, 1000), *seconds_of(1, 4, 2, 200), *seconds_of(2, 4, 10, 50)]
    assert slow_engines(lines) == {2: pytest.approx(20.0)}
    assert slow_engines(lines[:8]) == {}
    # A decoding step of 49 ms and one of 51 ms.
    assert slow_engines([*lines[:8], *seconds_of(2, 4, 49, 1000)]) == {}
    assert slow_engines([*lines[:8], *seconds_of(2, 4, 51, 1000)]) == {2: pytest.approx(5.1)}
    assert slow_engines([*lines[:8], *seconds_of(2, 2, 10, 50)]) == {}, "two seconds are too few"
    assert slow_engines(seconds_of(0, 9, 10, 50)) == {}, "it has no others to compare it with"
    assert slow_engines([*lines[:8], *seconds_of(2, 9, 0, 1)]) == {}, "seconds in which samples ran out"


def test_rows_arrive_in_the_order_of_keys() -> None:
    out = writing_of(Threads([WritingEngine(spec()) for _ in range(3)])).generate(GIVEN, SAMPLING)
    order = np.lexsort((out.keys[:, 2], out.keys[:, 1]))
    assert order.tolist() == list(range(len(out)))
