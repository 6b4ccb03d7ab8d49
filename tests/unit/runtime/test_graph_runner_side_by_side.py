"""Nodes of one step that run at the same time, because their roles have GPUs of their own."""

import threading
from typing import Any

import pytest

from rlflow.batch import Logprobs, Rollouts
from rlflow.compiler.graph import Graph
from rlflow.engines.fake import FakeEngine
from rlflow.errors import EngineError
from rlflow.nodes.base import GraphNode
from rlflow.nodes.scoring import ScoreLogprobs
from rlflow.runtime.graph_runner import GraphRunner
from rlflow.runtime.protocols import Engines
from tests.helpers import rollouts, sequences, spec

GIVEN = rollouts(sequences((3, 2), ((4, 1), (2, 2))))


class Meeting(FakeEngine):
    """Scores only once another engine scores too."""

    met = threading.Barrier(2)

    def logprobs(self, sequences: Any, temperature: float) -> Logprobs:
        self.met.wait(60)
        return super().logprobs(sequences, temperature)


class Broken(FakeEngine):
    def logprobs(self, sequences: Any, temperature: float) -> Logprobs:
        raise EngineError("it broke")


class Apart(Engines):
    """Roles of which only some share GPUs."""

    def __init__(self, sharing: set[frozenset[str]], **engines: Any) -> None:
        super().__init__(**engines)
        self.sharing = sharing
        self.idle: list[str] = []

    def are_apart(self, role: str, other: str | None) -> bool:
        return role != other and frozenset({role, other}) not in self.sharing

    def mark_idle(self, role: str) -> None:
        self.idle.append(role)


def graph(*roles: str) -> Graph:
    return Graph(
        nodes=tuple(
            GraphNode(name=f"by_{role}", operation=ScoreLogprobs(), role=role, inputs={"rollouts": "rollouts"})
            for role in roles
        )
    )


def run(engines: Apart, of: Graph) -> tuple[dict[str, Any], dict[str, float]]:
    outputs: dict[str, Any] = {}
    seconds = GraphRunner(of, engines).run(of, {"rollouts": GIVEN}, outputs.__setitem__, ends_step=True)
    return outputs, seconds


def test_two_roles_on_their_own_gpus_work_at_the_same_time() -> None:
    engines = Apart(set(), one=Meeting(spec()), other=Meeting(spec()))
    outputs, seconds = run(engines, graph("one", "other"))
    assert list(outputs) == ["by_one", "by_other"], "outputs come in the order of the graph"
    expected = FakeEngine(spec()).logprobs(GIVEN, 1.0).values.values
    assert all((each.values.values == expected).all() for each in outputs.values())
    assert seconds.keys() == {"by_one", "by_other"}
    assert engines.idle == ["one", "other"]


def test_roles_that_share_gpus_work_one_after_another() -> None:
    """The third role is on GPUs of its own, and starts with the first; the second waits for the first."""
    order: list[str] = []
    lock = threading.Lock()

    class Noting(FakeEngine):
        def __init__(self, name: str) -> None:
            super().__init__(spec())
            self.name = name

        def logprobs(self, sequences: Any, temperature: float) -> Logprobs:
            with lock:
                order.append(self.name)
            return super().logprobs(sequences, temperature)

    sharing = {frozenset({"a", "b"})}
    run(Apart(sharing, a=Noting("a"), b=Noting("b"), c=Noting("c")), graph("a", "b", "c"))
    assert order.index("a") < order.index("b")
    assert sorted(order) == ["a", "b", "c"]


def test_a_role_does_not_overtake_another_on_its_gpus() -> None:
    """The last node shares GPUs with the second, which must come first."""
    started: list[str] = []

    class Noting(FakeEngine):
        def __init__(self, name: str) -> None:
            super().__init__(spec())
            self.name = name

        def logprobs(self, sequences: Any, temperature: float) -> Logprobs:
            started.append(self.name)
            return super().logprobs(sequences, temperature)

    nodes = graph("a", "b", "c").nodes
    late = GraphNode(name="by_b", operation=ScoreLogprobs(), role="b", inputs={"rollouts": "by_a"})
    run_order = Graph(nodes=(nodes[0], late, nodes[2]))
    engines = Apart({frozenset({"b", "c"})}, a=Noting("a"), b=Noting("b"), c=Noting("c"))
    with pytest.raises(EngineError):  # logprobs are no rollouts
        run(engines, run_order)
    assert "c" not in started


def test_an_error_of_an_early_node_is_raised() -> None:
    engines = Apart(set(), one=FakeEngine(spec()), other=Broken(spec()))
    with pytest.raises(EngineError, match="it broke"):
        run(engines, graph("one", "other"))


def test_by_default_roles_share_what_they_run_on() -> None:
    assert not Engines().are_apart("one", "other")
    assert isinstance(GIVEN, Rollouts)
