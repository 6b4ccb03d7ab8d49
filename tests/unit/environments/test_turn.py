"""Turns of an environment in workers: whatever it does, each turn has an answer in time."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest

from rlflow.environments.base import Environment, Observation
from rlflow.environments.turn import EnvironmentSpec, TurnResult
from rlflow.rewards.base import Failure, Kind, Row
from rlflow.rewards.pool import ProcessPool
from tests.unit.environments import meeting, misbehaving

DEADLINE_S = 0.5
# The most that a test waits for an outcome.
LIMIT_S = 100.0
Begun = tuple[Mapping[str, Any], str | bytes | None]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    name = f"{misbehaving.__name__}:Misbehaving"
    limits = {"it": DEADLINE_S, "patient": LIMIT_S}
    pool = ProcessPool({turns: EnvironmentSpec(name, {}, limit_s) for turns, limit_s in limits.items()}, num_workers=2)
    assert pool.callables["it"].batch_size == 4
    yield pool
    pool.stop()


def answers(
    pool: ProcessPool, texts: Sequence[str], begun: Sequence[Begun] | None = None, name: str = "it"
) -> list[TurnResult | Failure]:
    """Return the answers to some turns."""
    return [future.result(LIMIT_S) for future in pool.submit(name, texts, begun or [({}, None)] * len(texts))]


@pytest.mark.parametrize(
    ("does", "kind", "reason"),
    [
        ("hang", "timeout", "took longer than its timeout_s of 0.5 s"),
        ("raise", "raised", "failed (ZeroDivisionError: integer division or modulo by zero)"),
        ("exit", "raised", "failed (SystemExit: 3)"),
        ("nothing", "invalid", "returned 'None', which is not an Observation, for 'nothing'"),
        ("a text", "invalid", "returned 'no', which is not an Observation, for 'a text'"),
        ("no text", "invalid", "returned Observation(text=7, done=False, reward=0.0), whose text must be"),
        ("perhaps", "invalid", "returned Observation(text='', done=2, reward=0.0), whose text must be"),
        ("NaN", "invalid", "returned a reward of nan for 'NaN'"),
        ("endless", "invalid", "returned a text of 1048577 characters for 'endless'"),
        ("keep a file", "invalid", "cannot be stored between turns (TypeError: cannot pickle '_io.TextIOWrapper'"),
        ("unknown", "raised", "failed (KeyError: 'unknown')"),
    ],
)
def test_what_goes_wrong_is_a_failure_of_that_turn_alone(does: str, kind: Kind, reason: str, pool: ProcessPool) -> None:
    before, given, after = answers(pool, ["good", does, "good"])
    assert isinstance(before, TurnResult)
    assert isinstance(after, TurnResult)
    assert before.text == after.text == "1"
    assert isinstance(given, Failure)
    assert given.kind == kind
    assert given.reason.startswith(reason)


def test_a_conversation_continues_from_its_state_in_any_worker(pool: ProcessPool) -> None:
    (first,) = answers(pool, ["good"])
    assert isinstance(first, TurnResult)
    again = answers(pool, ["good", "end"], [({}, first.state)] * 2)
    assert [(each.text, each.done, each.reward) for each in again if isinstance(each, TurnResult)] == [
        ("2", False, 0.5),
        ("", True, 1.0),
    ]


def test_answers_belong_to_their_turns(pool: ProcessPool) -> None:
    """Two calls of up to four turns each, one of which ends its process."""
    first = answers(pool, ["good", "end", "its own kind", "raise", "good"], name="patient")
    assert [answer.text if isinstance(answer, TurnResult) else answer.kind for answer in first] == [
        *("1", "", "1", "raised", "1")
    ]


def test_an_answer_has_at_most_16_mib(pool: ProcessPool) -> None:
    (answer,) = answers(pool, ["keep much"], name="patient")
    assert isinstance(answer, Failure)
    assert "returned 17 MiB, more than 16" in answer.reason


def test_a_turn_is_answered_while_another_takes_its_time(tmp_path: Path) -> None:
    options = {"file": str(tmp_path / "ended"), "waits": True}
    pool = ProcessPool({"meeting": EnvironmentSpec(f"{meeting.__name__}:Meeting", options, LIMIT_S)}, 2)
    (late,) = pool.submit("meeting", [""], [({"name": "late"}, None)])
    state = None
    for _ in range(meeting.TURNS):
        assert not late.done()
        (early,) = pool.submit("meeting", [""], [({"name": "early"}, state)])
        answer = early.result(LIMIT_S)
        assert isinstance(answer, TurnResult)
        state = answer.state
    assert isinstance(late.result(LIMIT_S), TurnResult)
    pool.stop()


def test_a_beginning_may_fail(pool: ProcessPool) -> None:
    good, bad = answers(pool, ["good", "good"], [({}, None), ({"number": "raise"}, None)])
    assert isinstance(good, TurnResult)
    assert bad == Failure("raised", "failed (KeyError: 'number')")


def test_subclasses_of_text_count_as_text(pool: ProcessPool) -> None:
    (answer,) = answers(pool, ["its own kind"])
    assert isinstance(answer, TurnResult)
    assert type(answer.text) is str


@dataclass
class Counting(Environment):
    """Counts turns, in an attribute that JSON can hold or in one that only a pickle can."""

    as_set: bool = False

    def reset(self, row: Row) -> None:
        self.seen: Any = set() if self.as_set else []

    def step(self, text: str) -> Observation:
        self.seen = {*self.seen, text} if self.as_set else [*self.seen, text]
        return Observation(",".join(sorted(self.seen)))


@pytest.mark.parametrize("as_set", [False, True])
def test_an_environment_is_stored_as_json_where_that_can_hold_it(as_set: bool) -> None:
    call: Any = EnvironmentSpec(f"{__name__}:Counting", {"as_set": as_set}, 1.0).load("counting").call
    [first] = call(["b"], [({}, None)])
    assert type(first.state) is (bytes if as_set else str)
    assert as_set or json.loads(first.state) == {"as_set": False, "seen": ["b"]}
    [second] = call(["a"], [({}, first.state)])
    assert second.text == "a,b"
    [again] = call(["c"], [({}, first.state)])
    assert again.text == "b,c", "a repeated turn starts from the state before it"


class Mood(StrEnum):
    GOOD = "good"


@dataclass
class Keeping(Environment):
    """Keeps a value of a kind, and answers whether it is what it was."""

    kind: str = ""

    def reset(self, row: Row) -> None:
        shared = ["s"]
        values = {
            "enum": Mood.GOOD,
            "subclass": Counter("aab"),
            "number": np.float64(0.5),
            "integer key": {1: "one"},
            "two places": [shared, shared],
            "tuple": ("a", "b"),
            "not a number": [math.nan],
            "text": "caf\u00e9 \ud800",
        }
        self.value: Any = values[self.kind]

    def step(self, text: str) -> Observation:
        if self.kind == "two places":
            self.value[0].append("t")
        return Observation(f"{type(self.value).__name__} {self.value!r}")


@pytest.mark.parametrize(
    ("kind", "form", "second_answer"),
    [
        ("enum", bytes, "Mood <Mood.GOOD: 'good'>"),
        ("subclass", bytes, "Counter Counter({'a': 2, 'b': 1})"),
        ("number", bytes, "float64 np.float64(0.5)"),
        ("integer key", bytes, "dict {1: 'one'}"),
        ("two places", bytes, "list [['s', 't', 't'], ['s', 't', 't']]"),
        ("tuple", bytes, "tuple ('a', 'b')"),
        ("not a number", str, "list [nan]"),
        ("text", str, "str 'caf\u00e9 \\ud800'"),
    ],
)
def test_an_attribute_is_the_same_after_a_turn(kind: str, form: type, second_answer: str) -> None:
    call: Any = EnvironmentSpec(f"{__name__}:Keeping", {"kind": kind}, 1.0).load("keeping").call
    [first] = call([""], [({}, None)])
    assert type(first.state) is form
    [second] = call([""], [({}, first.state)])
    assert second.text == second_answer


@dataclass
class StoredItsOwnWay(Environment):
    """An environment with a lock, which cannot be stored, and a number of turns, which JSON can hold."""

    turns: int = 0

    def step(self, text: str) -> Observation:
        self.turns += 1
        self.lock = Lock()
        return Observation(str(self.turns))

    def __getstate__(self) -> dict[str, int]:
        return {"turns": self.turns}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.turns, self.lock = state["turns"], Lock()


def test_an_environment_may_say_how_it_is_stored() -> None:
    call: Any = EnvironmentSpec(f"{__name__}:StoredItsOwnWay", {}, 1.0).load("own").call
    [first] = call([""], [({}, None)])
    [second] = call([""], [({}, first.state)])
    assert type(first.state) is bytes
    assert (first.text, second.text) == ("1", "2")
