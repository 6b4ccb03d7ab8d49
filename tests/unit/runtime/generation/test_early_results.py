"""Nodes that work while the rest is being written: here engines are threads of this process."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from rlflow.batch import Divergences, Prompts, Rewards, RolloutAdvantages, Rollouts
from rlflow.compiler.graph import Graph
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import GroupProgress
from rlflow.errors import EngineError
from rlflow.nodes.advantages import GroupAdvantage
from rlflow.nodes.base import GraphNode, Node
from rlflow.nodes.dynamic_sampling import DynamicSampling
from rlflow.nodes.generate import Generate
from rlflow.runtime.generation import early_results as listening
from rlflow.runtime.generation.early_results import CompleteSteps
from rlflow.runtime.graph_runner import GraphRunner
from rlflow.runtime.protocols import Engines, Subscriber
from rlflow.runtime.ray.role_proxy import RoleProxy
from tests.helpers import WritingEngine, prompts, rollouts, sequences, spec
from tests.stepwise import MAX_TOKENS, Dying, Stepwise
from tests.unit.runtime.ray.test_role_proxy import Threads, proxy

GIVEN = prompts(tuple(range(2, 22)))
JUDGED = {"rollouts": "rollouts", "rewards": "rewards"}


@dataclass(frozen=True, kw_only=True)
class Sums(Node, kind="sums_of_ids", unit="sample"):
    """The sum of a response's ids."""

    def run(self, rollouts: Rollouts) -> Rewards:
        sums = np.add.reduceat(rollouts.response_ids.values, rollouts.response_ids.offsets[:-1])
        return Rewards(values=sums.astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class Both(Node, kind="lengths_and_sums", unit="sample"):
    def run(self, rollouts: Rollouts, rewards: Rewards) -> Divergences:
        return Divergences(values=(rollouts.response_ids.lengths * 1000 + rewards.values).astype(np.float32))


class InTurn(Engines):
    """The role ``rollout`` tells who listens."""

    def __init__(self, engine: RoleProxy) -> None:
        super().__init__(rollout=engine)

    def stream_to(self, subscriber: Subscriber, role: str) -> Any:
        writing = self[role].engine_group
        assert writing is not None
        return writing.subscribed(subscriber)


@dataclass(frozen=True, kw_only=True)
class Scaled(Node, kind="scaled_advantages", unit="sample"):
    """Reads a group's output alone, so it works on groups too."""

    def run(self, advantages: RolloutAdvantages) -> Rewards:
        return Rewards(values=advantages.values.run_values * np.float32(3))


def graph(max_tokens: int, rewards: Node | None = None, advantages: Node | None = None) -> Graph:
    generate = Generate(max_tokens=max_tokens, group_size=3)
    return Graph(
        nodes=(
            GraphNode(name="rollouts", operation=generate, role="rollout", inputs={"prompts": "prompts"}),
            GraphNode(name="rewards", operation=rewards or Sums(), role=None, inputs={"rollouts": "rollouts"}),
            GraphNode(name="both", operation=Both(), role=None, inputs={"rollouts": "rollouts", "rewards": "rewards"}),
            GraphNode(name="advantages", operation=advantages or GroupAdvantage(), role=None, inputs=JUDGED),
            GraphNode(name="scaled", operation=Scaled(), role=None, inputs={"advantages": "advantages"}),
            GraphNode(name="sampling", operation=DynamicSampling(), role=None, inputs=JUDGED),
        )
    )


def outputs(engines: list[Any], of: Graph) -> dict[str, Any]:
    made: dict[str, Any] = {}
    runner = GraphRunner(of, InTurn(proxy(Threads(engines), concurrent=True)))
    runner.run(of, {"prompts": GIVEN}, made.__setitem__)
    return made


def check(made: dict[str, Any]) -> None:
    rollouts = made["rollouts"]
    sums = [sum(rollouts.response_ids[row].tolist()) for row in range(len(rollouts))]
    assert len(sums) == len(GIVEN) * 3
    assert made["rewards"].values.tolist() == sums
    lengths = rollouts.response_ids.lengths.tolist()
    assert made["both"].values.tolist() == [1000 * length + each for length, each in zip(lengths, sums, strict=True)]
    # Every bit is that of a single call on everything.
    advantages = GroupAdvantage().run(rollouts, made["rewards"]).values
    assert made["advantages"].values.run_values.tobytes() == advantages.run_values.tobytes()
    assert made["advantages"].values.run_lengths.tolist() == lengths
    assert made["scaled"].values.tobytes() == (advantages.run_values * np.float32(3)).tobytes()
    by_group = [sums[start : start + 3] for start in range(0, len(sums), 3)]
    assert made["sampling"].chosen.tolist() == [len(set(group)) > 1 for group in by_group]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines report parts from the beginning."""
    monkeypatch.setattr(listening, "_MIN_SECONDS", 0.0)


@dataclass(frozen=True, kw_only=True)
class ReleasingGroups(GroupAdvantage, kind="advantages_that_release", unit="group"):
    """A node whose first outputs let the waiting engines finish."""

    def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
        assert len(rollouts) % 3 == 0
        assert len(rollouts) < len(GIVEN) * 3 or Waiting.scored.is_set()
        Waiting.scored.set()
        return super().run(rollouts, rewards)


@dataclass(frozen=True, kw_only=True)
class Releasing(Sums, kind="sums_that_release", unit="sample"):
    """A node whose first outputs let the waiting engines finish."""

    def run(self, rollouts: Rollouts) -> Rewards:
        Waiting.scored.set()
        return super().run(rollouts)


class Waiting(WritingEngine):
    """An engine that finishes the last prompt only after the first outputs of a node."""

    scored = threading.Event()

    def response(self, sample: Prompts, sampling: Sampling) -> "Future[Any]":
        if sample.keys[0, 1] < len(GIVEN) - 1:
            return super().response(sample, sampling)
        late: Future[Any] = Future()

        def finish() -> None:
            assert Waiting.scored.wait(60)
            late.set_result(super(Waiting, self).response(sample, sampling).result())

        threading.Thread(target=finish, daemon=True).start()
        return late


@pytest.mark.parametrize("room", [8, 100])
def test_scoring_starts_before_generation_ends(room: int) -> None:
    """The engines wait for the first scores, so the test hangs otherwise."""
    Waiting.scored.clear()
    check(outputs([Waiting(spec(), (room, 10_000)) for _ in range(2)], graph(4, Releasing())))


@pytest.mark.parametrize("room", [8, 100])
def test_group_nodes_start_with_the_first_complete_groups(room: int) -> None:
    """The engines wait for the first advantages, so the test hangs otherwise."""
    Waiting.scored.clear()
    check(outputs([Waiting(spec(), (room, 10_000)) for _ in range(2)], graph(4, advantages=ReleasingGroups())))


def test_a_group_node_gets_each_group_once_and_whole() -> None:
    given: list[list[tuple[int, ...]]] = []

    @dataclass(frozen=True, kw_only=True)
    class Noting(GroupAdvantage, kind="advantages_noted", unit="group"):
        def run(self, rollouts: Rollouts, rewards: Rewards) -> RolloutAdvantages:
            given.append(list(map(tuple, rollouts.keys.tolist())))
            return super().run(rollouts, rewards)

    engines = [Stepwise(spec(), (16, 10_000)) for _ in range(2)]
    made = outputs(engines, graph(MAX_TOKENS, advantages=Noting()))
    check(made)
    assert 1 < len(given) <= 9
    assert all(keys == sorted(keys) and len(keys) % 3 == 0 for keys in given)
    assert sorted(key for keys in given for key in keys) == list(map(tuple, made["rollouts"].keys.tolist()))


def test_parts_are_few_and_each_sample_is_scored_once() -> None:
    given: list[int] = []

    @dataclass(frozen=True, kw_only=True)
    class Counting(Sums, kind="sums_counted", unit="sample"):
        def run(self, rollouts: Rollouts) -> Rewards:
            given.append(len(rollouts))
            return super().run(rollouts)

    check(outputs([Stepwise(spec(), (16, 10_000)) for _ in range(2)], graph(MAX_TOKENS, Counting())))
    assert sum(given) == len(GIVEN) * 3
    assert 4 < len(given) <= 2 * 8 + 1


@pytest.mark.parametrize(("when", "at"), [("preempt", 3), ("advance", 4), ("take_rollouts", 2), ("finish_session", 1)])
def test_samples_lost_with_an_engine_are_scored_again(when: str, at: int) -> None:

    class Here(Dying):
        pass

    Here.when, Here.at = when, at
    dying = Here(spec(), (16, 150))
    check(outputs([Stepwise(spec(), (16, 150)), dying], graph(MAX_TOKENS)))


@dataclass(frozen=True, kw_only=True)
class Unlucky(Sums, kind="sums_of_few", unit="sample"):
    """A node that can judge only its first part."""

    parts: ClassVar[list[int]] = []

    def run(self, rollouts: Rollouts) -> Rewards:
        self.parts.append(len(rollouts))
        rewards = super().run(rollouts)
        return rewards if len(self.parts) == 1 else Rewards(values=np.full(len(rollouts), np.nan, np.float32))


def test_a_part_without_rewards_is_no_failure_where_others_have_some() -> None:
    Unlucky.parts.clear()
    made = outputs([Stepwise(spec(), (16, 10_000)) for _ in range(2)], graph(MAX_TOKENS, Unlucky()))
    assert len(Unlucky.parts) > 2
    assert int((~np.isnan(made["rewards"].values)).sum()) == Unlucky.parts[0]


def test_what_fails_ends_the_step() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Failing(Sums, kind="sums_that_always_fail", unit="sample"):
        def run(self, rollouts: Rollouts) -> Rewards:
            raise EngineError("the service is down")

    with pytest.raises(EngineError, match="the service is down"):
        outputs([Stepwise(spec(), (16, 10_000))], graph(MAX_TOKENS, Failing()))


class Steps:
    """Two samples of each prompt: rows 0 to 3 are of step 5, rows 4 and 5 of step 6. All responses have one token."""

    def __init__(self, done: Sequence[int] = ()) -> None:
        """Start with these rows done."""
        self._prompts = Prompts.concatenate([prompts((3, 3), step=5), prompts((3,), step=6)])
        earlier = self.rollouts(done) if done else None
        self._groups = GroupProgress(self._prompts, Sampling(group_size=2, max_tokens=1), earlier)
        self.received: dict[int, list[int]] = {}
        self.results = CompleteSteps(self._receive, self._groups, self._prompts.keys[:, 0])

    def rollouts(self, rows: Sequence[int]) -> Rollouts:
        samples = sequences((3, 3, 3), ((1, 1), (1, 1), (1, 1)))
        keys = self._prompts.repeat(2).keys
        return replace(rollouts(samples), keys=keys).take(np.array(rows))

    def deliver(self, rank: int, rows: Sequence[int]) -> None:
        self.results.deliver(rank, self.rollouts(rows))

    def _receive(self, step: int, received: Rollouts) -> None:
        assert step not in self.received
        self.received[step] = self._groups.rows_of(received.keys).tolist()


def test_a_step_leaves_with_all_its_rows_when_the_last_is_finished() -> None:
    steps = Steps(done=[1])
    assert steps.results.due(0, [0, 4]) == {}
    assert steps.results.due(1, [2]) == {}
    assert steps.results.due(0, [3]) == {0: [0, 3], 1: [2]}
    steps.deliver(0, [0, 3])
    assert steps.received == {}
    steps.deliver(1, [2])
    assert steps.received == {5: [0, 1, 2, 3]}
    assert steps.results.due(1, [5]) == {0: [4], 1: [5]}
    steps.deliver(1, [5])
    steps.deliver(0, [4])
    assert steps.received == {5: [0, 1, 2, 3], 6: [4, 5]}
    assert sum(len(part) for part in steps.results.delivered) == 5


def test_rows_of_a_failed_engine_are_requested_from_the_engine_that_generates_them_again() -> None:
    steps = Steps()
    steps.results.due(0, [0, 1])
    assert steps.results.due(1, [2, 3]) == {0: [0, 1], 1: [2, 3]}
    steps.deliver(0, [0, 1])
    steps.results.discard_engine(0)
    steps.deliver(1, [2, 3])
    assert steps.received == {}
    assert steps.results.due(1, [0]) == {}
    assert steps.results.due(2, [1]) == {1: [0], 2: [1]}
    steps.deliver(2, [1])
    steps.deliver(1, [0])
    assert steps.received == {5: [0, 1, 2, 3]}
    steps.results.discard_engine(1)
    assert steps.results.due(2, [0, 2, 3]) == {}, "the step has left"
