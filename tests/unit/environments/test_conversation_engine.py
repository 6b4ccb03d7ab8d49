"""Conversations on an engine that takes new samples while it generates: none waits for another."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Conversations, Packed, Prompts, Repeated, Rollouts
from rlflow.engines.base import EngineSpec, Sampling, sample_seed
from rlflow.engines.fake import FakeEngine
from rlflow.engines.group_progress import NO_RESPONSE, GroupProgress, PartialResponse, prepend_partial
from rlflow.engines.serving.activity import EngineActivity
from rlflow.engines.serving.sessions import SessionEngine
from rlflow.environments import exchange
from rlflow.environments.conversation_engine import ConversationEngine
from rlflow.environments.turn import EnvironmentSpec
from rlflow.errors import EngineError, EnvironmentFailedError
from rlflow.nodes.generate import Converse
from rlflow.runtime.generation.dispatcher import LaterSteps
from rlflow.runtime.generation.engine_group import EngineGroup
from tests.helpers import WritingEngine, prompts, spec
from tests.unit.environments import echo
from tests.unit.runtime.ray.test_role_proxy import Threads

ECHO = f"{echo.__name__}:Echo"
NODE = Converse(environment=ECHO, max_turns=3, turn_tokens=4, max_tokens=20, group_size=2)
SAMPLING = NODE.sampling
LIMIT_S = 20.0


class Here:
    """Worker processes in place of which this one answers, at once."""

    def __init__(self, specs: Mapping[str, EnvironmentSpec], num_workers: int) -> None:
        self._calls = {name: spec.load(name).call for name, spec in specs.items()}

    def submit(self, name: str, texts: Sequence[str], rows: Sequence[Any]) -> "list[Future[Any]]":
        futures: list[Future[Any]] = [Future() for _ in texts]
        for future, text, row in zip(futures, texts, rows, strict=True):
            (answer,) = self._calls[name]([text], [row])
            future.set_result(answer)
        return futures


@pytest.fixture(autouse=True)
def _here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(exchange, "ProcessPool", Here)


def turn_of(key: Sequence[int], length: int = 4) -> list[int]:
    """Return the tokens of a turn. A 0 ends it."""
    draw = np.random.default_rng(sample_seed(0, np.array(key)))
    return [*draw.integers(1, 10, draw.integers(1, length)).tolist(), 0]


def key(turn: int, prompt: int, sample: int = 0) -> tuple[int, ...]:
    """Return the key of a turn of step 0."""
    return (0, (turn << 40) + (prompt << 20) + sample, 0) if turn else (0, prompt, sample)


def text_of(turn: int, prompt: int) -> str:
    return "".join(map(str, turn_of(key(turn, prompt))))


# Some conversations end after their first or second turn.
LAST = (text_of(0, 2), text_of(0, 1), text_of(1, 2), text_of(1, 3))
GIVEN = replace(prompts((3, 5, 2, 4)), rows=tuple({"last": last} for last in LAST))


class Stepped(SessionEngine, FakeEngine):
    """An engine that generates when it is told to: all that is left of a turn, or a token."""

    def __init__(self, given: EngineSpec, room: tuple[int, int] = (16, 10_000)) -> None:
        super().__init__(given)
        self._room = room
        self.live: dict[tuple[int, ...], Any] = {}
        """The turns by their keys."""
        self.begun: list[tuple[tuple[int, ...], list[int], int]] = []
        """Key, prompt and number of tokens before of each turn."""
        self.changed = threading.Condition()

    @property
    def capacity(self) -> tuple[int, int]:
        return self._room

    @property
    def decode_steps(self) -> int:
        return 0

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        futures: list[Future[Any]] = [Future() for _ in range(len(samples))]
        with self.changed:
            for row, before in enumerate(partial or [NO_RESPONSE] * len(samples)):
                key = tuple(samples.keys[row].tolist())
                left = turn_of(key)[len(before.ids) :]
                turn = SimpleNamespace(ids=[], left=left, partial=before, future=futures[row], is_done=False)
                self.begun.append((key, samples.ids[row].tolist(), len(before.ids)))
                self.live[key] = turn
            self.changed.notify_all()
        self.started()
        return futures

    def started(self) -> None:
        """Generate nothing yet."""

    def wait_for(self, key: tuple[int, ...]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.live, LIMIT_S), key

    def generate_token(self, key: tuple[int, ...]) -> None:
        turn = self.live[key]
        turn.ids.append(turn.left.pop(0))

    def end_turn(self, key: tuple[int, ...]) -> None:
        self.wait_for(key)
        turn = self.live.pop(key)
        turn.ids += turn.left
        turn.is_done = True
        turn.future.set_result(turn)

    def abort(self, futures: "Collection[Future[Any]]") -> None:
        for key, turn in list(self.live.items()):
            if turn.future in futures:
                del self.live[key]
                turn.future.set_result(turn)

    def take_activity(self) -> list[EngineActivity]:
        return []

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        ids = Packed.from_rows([turn.ids for turn in responses], np.int32)
        versions = Repeated(np.full(len(ids), self._version, np.int32), ids.lengths)
        columns = prepend_partial(
            [turn.partial for turn in responses], ids, ids.like(-ids.values.astype(np.float32) / 8), versions
        )
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=columns[0],
            logprobs=columns[1],
            versions=columns[2],
            temperature=1.0,
            finished=np.array([turn.is_done for turn in responses]),
            texts=tuple("".join(map(str, columns[0][row].tolist())) for row in range(len(samples))),
            rows=samples.rows,
        )


class Eager(Stepped):
    """Generates each turn at once."""

    def started(self) -> None:
        for key in list(self.live):
            self.end_turn(key)


class Batches(Eager):
    """Generates the same turns in batches."""

    def generate(self, given: Prompts, sampling: Sampling) -> Rollouts:
        if sampling.turns is not None:
            return sampling.turns.generate(self, given, sampling)
        return super().generate(given, sampling)


def check_same(out: Rollouts, expected: Rollouts) -> None:
    assert isinstance(out, Conversations)
    assert isinstance(expected, Conversations)
    for name in ("keys", "finished", "reasons"):
        assert getattr(out, name).tolist() == getattr(expected, name).tolist(), name
    for name in ("prompt_ids", "response_ids", "logprobs", "versions", "turn", "turn_rewards", "unfinished"):
        one, other = (getattr(each, name) for each in (out, expected))
        assert [row.tolist() for row in map(one.__getitem__, range(len(out)))] == [
            row.tolist() for row in map(other.__getitem__, range(len(out)))
        ], name
    assert (list(out.texts), list(out.rows), out.temperature) == (
        list(expected.texts),
        list(expected.rows),
        expected.temperature,
    )


def test_a_conversation_does_not_wait_for_another() -> None:
    """One takes all its turns while the engine generates the other's first."""
    engine = Stepped(spec())
    given = replace(GIVEN, rows=({"last": "none"},) * 4)
    engine.begin_session(given.take(np.arange(2)), replace(SAMPLING, group_size=1))
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(engine.advance(np.arange(2, dtype=np.int32).tobytes(), 1)))
    thread.start()
    for turn in range(3):
        engine.end_turn(key(turn, 1))
    thread.join(LIMIT_S)
    assert np.frombuffer(done[0].rows, np.int32).tolist() == [1]
    assert list(engine.live) == [key(0, 0)]
    # These are the tokens of "1" and "22".
    answers = [[2], [3, 3]]
    prompt = GIVEN.ids[1].tolist()
    for turn, (found, tokens, _) in enumerate(engine.begun[1:]):
        assert found == key(turn, 1)
        assert tokens == prompt
        prompt += [*turn_of(found), *answers.pop(0)] if answers else []


@pytest.mark.parametrize("kind", [Eager, pytest.param(WritingEngine, marks=pytest.mark.slow)])
def test_samples_are_those_of_turns_in_batches(kind: type[Any]) -> None:
    batches = Batches(spec()) if kind is Eager else FakeEngine(spec())
    expected = NODE.run(batches, GIVEN)
    assert len(set(expected.turn_rewards.lengths.tolist())) > 1
    check_same(NODE.run(kind(spec()), GIVEN), expected)
    for room in (1, 3, 100):
        group = EngineGroup("role", Threads([kind(spec(), (room, 10_000)) for _ in range(2)]), lambda: None)
        check_same(group.generate(GIVEN, SAMPLING), expected)


def interrupted_in_turn(engine: Stepped) -> None:
    engine.end_turn(key(0, 0))
    engine.wait_for(key(1, 0))
    engine.generate_token(key(1, 0))


def interrupted_in_first_turn(engine: Stepped) -> None:
    engine.wait_for(key(0, 0))
    engine.generate_token(key(0, 0))


def interrupted_before_a_turn(engine: Stepped) -> None:
    engine.end_turn(key(0, 0))
    engine.wait_for(key(1, 0))


@pytest.mark.parametrize("until", [interrupted_in_turn, interrupted_in_first_turn, interrupted_before_a_turn])
def test_a_preempted_conversation_goes_on_elsewhere(until: Callable[[Stepped], None]) -> None:
    given, sampling = GIVEN.take(np.array([0])), replace(SAMPLING, group_size=1)
    expected = Eager(spec()).generate(given, sampling)
    first, second = Stepped(spec()), Eager(spec())
    first.begin_session(given, sampling)
    row = np.zeros(1, np.int32).tobytes()
    session = first._session
    assert session is not None
    session._submit(np.zeros(1, np.int64), None)
    until(first)
    partial = first.preempt(row)
    assert isinstance(partial, Conversations)
    assert not GroupProgress(given, sampling, partial).done.any()
    assert partial.response_ids[0].tolist() == expected.response_ids[0].tolist()[: len(partial.response_ids[0])]
    assert partial.turn[0].tolist() == expected.turn[0].tolist()[: len(partial.turn[0])]  # type: ignore[attr-defined]
    assert first.finish_session() is None
    second.begin_session(given, sampling)
    second.advance(row, 1, partial)
    out = second.finish_session()
    assert out is not None
    check_same(out, expected)
    # The tokens from before are not generated again.
    assert all(
        len(prompt) + before >= len(given.ids[0]) + len(partial.response_ids[0]) for _, prompt, before in second.begun
    )


def test_a_conversation_that_waits_for_its_environment_is_asked_about_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's answer is ignored once the conversation has left."""
    given, sampling = GIVEN.take(np.array([0])), replace(SAMPLING, group_size=1)
    engine = Stepped(spec())
    conversing = engine._engine_of(sampling)
    assert isinstance(conversing, ConversationEngine)
    answers: list[Future[Any]] = []
    ask, asked = conversing._exchange.ask, threading.Event()

    def withhold(*arguments: Any) -> "list[Future[Any]]":
        found = ask(*arguments)
        late: list[Future[Any]] = [Future() for _ in found]
        answers.extend(found)
        if found:
            asked.set()
        return late

    monkeypatch.setattr(conversing._exchange, "ask", withhold)
    engine.begin_session(given, sampling)
    row = np.zeros(1, np.int32).tobytes()
    assert engine._session is not None
    engine._session._submit(np.zeros(1, np.int64), None)
    engine.end_turn(key(0, 0))
    assert asked.wait(LIMIT_S)
    assert engine.progress > 0, "a clock, so that nobody takes the engine for dead"
    partial = engine.preempt(row)
    assert isinstance(partial, Conversations)
    assert partial.response_ids[0].tolist() == turn_of(key(0, 0))
    assert engine.progress == 0
    second = Eager(spec())
    second.begin_session(given, sampling)
    second.advance(row, 1, partial)
    out = second.finish_session()
    assert out is not None
    check_same(out, Eager(spec()).generate(given, sampling))
    assert second.begun[0][0] == key(1, 0)


class Dying(Eager):
    """Fails at its third turn."""

    at = 3

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        if len(self.begun) >= self.at:
            raise EngineError("it died")
        return super().submit(samples, sampling, partial)


def test_conversations_of_an_engine_that_fails_go_to_the_others() -> None:
    group = EngineGroup("role", Threads([Eager(spec(), (2, 10_000)), Dying(spec(), (2, 10_000))]), lambda: None)
    check_same(group.generate(GIVEN, SAMPLING), NODE.run(Batches(spec()), GIVEN))
    assert [failure["failed"] for failure in group.take_failures()] == ["it died"]


@pytest.mark.slow
@pytest.mark.processes
def test_an_environment_that_hangs_is_no_failure_of_an_engine() -> None:
    node = replace(NODE, environment="tests.unit.environments.slow:Hanging", timeout_s=0.2)
    engines = Threads([Eager(spec()) for _ in range(2)])
    group = EngineGroup("role", engines, lambda: None)
    with pytest.raises(
        EnvironmentFailedError, match=r"^environment '.*Hanging' took longer than its timeout_s of 0.2 s"
    ):
        group.generate(GIVEN, node.sampling)
    assert group.take_failures() == []


def test_partial_conversations_are_complete_in_the_next_generation() -> None:
    """Two conversations are complete at the interrupt; one is in its first turn, one between two turns."""
    expected = NODE.run(Batches(spec()), GIVEN)
    engine, found = Stepped(spec()), []
    group, ahead = EngineGroup("role", Threads([engine]), lambda: None), LaterSteps(Future(), lambda step, _: None)
    thread = threading.Thread(target=lambda: found.append(group.generate_ahead(GIVEN, SAMPLING, None, ahead)))
    thread.start()
    engine.wait_for(key(0, 1))
    engine.generate_token(key(0, 1))
    engine.end_turn(key(0, 3, 1))
    engine.wait_for(key(1, 3, 1))
    for sample in range(2):
        for turn in range(int(expected.turn_rewards.lengths[sample])):
            engine.end_turn(key(turn, 0, sample))
    session = engine._session
    assert session is not None
    deadline = time.monotonic() + LIMIT_S
    while not all(row not in session._generating or session._generating[row].done() for row in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ahead.interrupt.set_result(None)
    thread.join(LIMIT_S)
    (partial,) = found
    assert isinstance(partial, Conversations)
    assert partial.keys[:, 1:].tolist() == [[0, 0], [0, 1], [1, 0], [3, 1]]
    assert (partial.unfinished.lengths > 0).tolist() == [False, False, True, True]
    assert partial.response_ids[2].tolist() == turn_of(key(0, 1))[:1]
    later = EngineGroup("role", Threads([Eager(spec())]), lambda: None)
    out = later.generate_ahead(GIVEN, SAMPLING, partial, LaterSteps(Future(), lambda step, _: None))
    assert out is not None
    check_same(out, expected)
