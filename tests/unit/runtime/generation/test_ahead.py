"""Generation ahead of training: engines are threads of this process whose responses are known beforehand."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.batch import Prompts, Rollouts
from rlflow.compiler.graph import Graph
from rlflow.errors import EngineError, NotFiniteError
from rlflow.nodes.base import GraphNode
from rlflow.nodes.generate import Generate
from rlflow.resources.workload import Overlap
from rlflow.runtime.generation.ahead import AheadGeneration
from rlflow.runtime.generation.ahead_own_gpus import AheadOnOwnGpus
from rlflow.runtime.generation.ahead_shared_gpus import AheadOnSharedGpus
from rlflow.runtime.generation.resampling import RunGraph
from rlflow.runtime.graph_runner import GraphRunner
from rlflow.runtime.protocols import Engines
from tests.helpers import prompts, spec
from tests.stepwise import MAX_TOKENS, Stepwise, response
from tests.unit.runtime.ray.test_role_proxy import LAYOUT, Threads, proxy

BATCH, STEPS = 4, 6
GENERATE = Generate(max_tokens=MAX_TOKENS, group_size=2)
NODE = GraphNode(name="rollouts", operation=GENERATE, role="rollout", inputs={"prompts": "prompts"})
GRAPH = Graph(nodes=(NODE,))


class Data:
    """Gives each step its prompts."""

    def prompts(self, step: int) -> Prompts:
        return prompts((3,) * BATCH, step=step, seed=step)

    def copy_locally(self, rollouts: Rollouts) -> Rollouts:
        return rollouts


class Flaky(Stepwise):
    """Fails in its calls with these numbers, counted over all engines of a test."""

    failing: frozenset[int] = frozenset()
    calls = 0
    lock = threading.Lock()

    def advance(self, rows: bytes, enough: int, begun: Rollouts | None = None) -> Any:
        with Flaky.lock:
            Flaky.calls += 1
            fails = Flaky.calls in Flaky.failing
        if fails:
            raise EngineError("it died")
        return super().advance(rows, enough, begun)


class Watched(Threads):
    """Workers that are never asked to preempt a row while they do so already."""

    def __init__(self, engines: list[Any]) -> None:
        super().__init__(engines)
        self._leaving: dict[int, dict[int, Future[Any]]] = {rank: {} for rank in range(len(engines))}
        self.num_preempted = 0

    def submit(self, rank: int, method: str, *arguments: Any, wanted: bool = True) -> "Future[Any]":
        rows = np.frombuffer(arguments[0], np.int32).tolist() if method == "preempt" else []
        assert all(row not in self._leaving[rank] or self._leaving[rank][row].done() for row in rows)
        self.num_preempted += len(rows)
        call = super().submit(rank, method, *arguments, wanted=wanted)
        self._leaving[rank] |= dict.fromkeys(rows, call)
        return call


class Harness(Engines):
    """The engines of one role, a trainer that only counts, and what each step was trained on."""

    def __init__(
        self, overlap: Overlap, engines: int = 2, room: tuple[int, int] = (3, 10_000), *, shared: bool = False
    ) -> None:
        """Take ``shared`` engines, which are on the GPUs of the trainer."""
        self.workers: Watched = Watched([Flaky(spec(), room) for _ in range(engines)])
        super().__init__(rollout=proxy(self.workers, LAYOUT, concurrent=True))
        self["rollout"].resync = lambda: self.sync(len(self.trained))
        self.overlap, self.shared = overlap, shared
        self.trained: list[Rollouts] = []
        self.syncs: list[int] = []
        self.is_training = False

    def on_lost_weights(self, role: str, resync: Callable[[], None]) -> None:
        self[role].resync = resync

    def sync(self, version: int) -> float:
        assert not self.is_training, "weights leave the trained role between two steps only"
        assert version == len(self.trained), "weights have the number of steps that have trained them"
        self.syncs.append(version)
        for engine in self.workers.engines:
            assert not engine._live, "weights reach engines that generate nothing"
            engine._version = version
        self["rollout"].engine_group.weights_synced()
        return 0.0

    def ahead(self, graph: Graph = GRAPH, run_graph: RunGraph | None = None) -> AheadGeneration:
        recipe: Any = SimpleNamespace(overlap=self.overlap, steps=STEPS)
        data: Any = Data()
        form = AheadOnSharedGpus if self.shared else AheadOnOwnGpus
        return form(graph, recipe, self, data, run_graph or GraphRunner(graph, self).run, self.sync)

    def train(self, ahead: AheadGeneration, until: int, delays: Sequence[int] = ()) -> list[dict[str, float]]:
        """Train up to step ``until``; a delay is work of the trainer, during which engines may generate."""
        metrics = []
        ahead.sync(len(self.trained))
        while (step := len(self.trained)) < until:
            edges: dict[str, Any] = {}
            metrics.append(ahead.run(step, edges, lambda name, output: None)[1])
            self.is_training = True
            for _ in range(delays[step] if delays else 0):
                np.linalg.inv(np.eye(24))
                assert not (self.shared and any(engine._live for engine in self.workers.engines))
            self.trained.append(edges["rollouts"])
            self.is_training = False
            ahead.sync(step + 1)
        return metrics

    def check(self) -> None:
        """Check that each step got its own samples, complete, in order, and none too old."""
        for step, out in enumerate(self.trained):
            expected = Data().prompts(step).repeat(GENERATE.group_size).keys
            assert out.keys.tolist() == expected.tolist()
            for row, key in enumerate(out.keys):
                assert out.response_ids[row].tolist() == response(key)
                versions = out.versions[row]
                assert (step - versions <= self.overlap.max_staleness).all()
                assert (np.diff(versions) >= 0).all()
                # The engine itself writes down the version of each token.
                assert out.logprobs[row].tolist() == (-versions.astype(np.float32)).tolist()


def versions_of(harness: Harness) -> list[list[int]]:
    return [sorted(set(out.versions.values.tolist())) for out in harness.trained]


def run(overlap: Overlap, delays: Sequence[int] = (), **options: Any) -> tuple[Harness, list[dict[str, float]]]:
    Flaky.calls = 0
    harness = Harness(overlap, **options)
    ahead = harness.ahead()
    try:
        metrics = harness.train(ahead, STEPS, delays)
    finally:
        ahead.close()
    harness.check()
    return harness, metrics


@pytest.fixture(autouse=True)
def _no_failures() -> None:
    Flaky.failing = frozenset()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_deterministic_steps_have_the_version_that_is_exactly_so_much_older(staleness: int) -> None:
    for delays in ((0,) * STEPS, (200, 0, 50, 300, 0, 10)):
        harness, metrics = run(Overlap(max_staleness=staleness), delays)
        assert versions_of(harness) == [[max(0, step - staleness)] for step in range(STEPS)]
        assert [line["overlap/staleness_mean"] for line in metrics] == [min(step, staleness) for step in range(STEPS)]
        assert harness.syncs == list(range(STEPS + 1))


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_each_step_is_complete_and_not_too_old(in_flight: Any) -> None:
    for staleness in (1, 2, 4):
        harness, metrics = run(
            Overlap(max_staleness=staleness, in_flight=in_flight, deterministic=False), (30,) * STEPS
        )
        assert max(line["overlap/staleness_max"] for line in metrics) <= staleness
        assert harness.syncs[-1] == STEPS


def test_unfinished_samples_continue_with_new_weights() -> None:
    """An engine with room for three of the eight samples has not finished two steps when the first is trained.

    The thread that trains may sleep until it has, so this may take several runs.
    """

    def has_mixed_samples() -> bool:
        harness, _ = run(Overlap(max_staleness=2, in_flight="keep", deterministic=False), engines=1)
        rows = (out.versions[row] for out in harness.trained for row in range(len(out)))
        return any(len(set(versions.tolist())) > 1 for versions in rows)

    assert any(has_mixed_samples() for _ in range(20))


def test_a_complete_step_is_trained_while_later_ones_are_generated() -> None:
    """The engine has room for three of the 24 samples that it may generate with its first weights."""
    harness = Harness(Overlap(max_staleness=2, in_flight="keep", deterministic=False), engines=1)
    ahead = harness.ahead()
    ahead.sync(0)
    edges: dict[str, Any] = {}
    seconds, _ = ahead.run(0, edges, lambda name, output: None)
    assert not harness.workers.num_preempted
    assert edges["rollouts"].keys[:, 0].tolist() == [0] * BATCH * GENERATE.group_size
    assert seconds["rollouts"] > 0
    ahead.close()


@pytest.mark.slow
def test_a_pause_has_the_newest_weights_and_generates_nothing() -> None:
    options: list[Any] = [("wait", True), ("wait", False), ("keep", False)]
    for in_flight, deterministic in options:
        harness = Harness(Overlap(max_staleness=2, in_flight=in_flight, deterministic=deterministic))
        ahead = harness.ahead()
        for step in range(1, STEPS):
            harness.train(ahead, step)
            with ahead.paused():
                assert harness.syncs[-1] == step
                assert not any(engine._live for engine in harness.workers.engines)
        ahead.close()
        harness.check()


@pytest.mark.slow
def test_a_resumed_run_trains_on_what_was_generated_before(tmp_path: Path) -> None:
    for stop in range(1, STEPS):
        harness = Harness(Overlap(max_staleness=2))
        ahead = harness.ahead()
        harness.train(ahead, stop)
        ahead.save(tmp_path)
        ahead.close()
        harness.workers = Watched([Flaky(spec(), (3, 10_000)) for _ in range(2)])
        harness["rollout"] = proxy(harness.workers, LAYOUT, concurrent=True)
        resumed = harness.ahead()
        resumed.restore(tmp_path)
        harness.train(resumed, STEPS)
        resumed.close()
        harness.check()
        assert versions_of(harness) == [[max(0, step - 2)] for step in range(STEPS)]


def test_a_step_that_is_to_be_skipped_is_skipped_by_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples may be fine: all steps that are judged in one call are skipped together."""
    harness = Harness(Overlap(max_staleness=2))
    ahead = harness.ahead()
    harness.train(ahead, 1)
    ahead._complete(1)
    problem = NotFiniteError("1 of 8 advantages are NaN")
    problem.node = "advantages"
    ahead._steps[1].error = problem
    ahead.save(tmp_path)
    ahead.close()
    resumed = harness.ahead()
    judged: list[Any] = []
    monkeypatch.setattr(resumed._nodes, "judge", judged.append)
    resumed.restore(tmp_path)
    found = resumed._steps[1]
    with pytest.raises(NotFiniteError, match=r"node advantages: 1 of 8 advantages are NaN"):
        resumed.run(1, {}, lambda name, output: None)
    assert any(each is found for each in judged), "its batch is saved with what the judges say"
    resumed.close()


def test_samples_of_a_checkpoint_are_judged_before_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that judges takes one call at a time, and the generating thread runs it as well."""
    harness = Harness(Overlap(max_staleness=2))
    ahead = harness.ahead()
    harness.train(ahead, 1)
    ahead._complete(1)
    ahead.save(tmp_path)
    ahead.close()
    resumed = harness.ahead()
    calls: list[str] = []
    is_awaited = threading.Event()
    generate, wait_for_judges = resumed._nodes.run, resumed._wait_for_judges

    def judge(found: Any) -> None:
        is_awaited.wait(10)
        calls.append("judge")

    def noted_generate(steps: Sequence[int]) -> Any:
        calls.append("generate")
        return generate(steps)

    def noted_wait() -> None:
        is_awaited.set()
        wait_for_judges()

    monkeypatch.setattr(resumed._nodes, "judge", judge)
    monkeypatch.setattr(resumed._nodes, "run", noted_generate)
    monkeypatch.setattr(resumed, "_wait_for_judges", noted_wait)
    resumed.restore(tmp_path)
    harness.train(resumed, STEPS)
    resumed.close()
    assert calls[0] == "judge"
    assert "generate" not in calls[: calls.count("judge")]


def test_no_other_node_runs_once_the_run_has_ended() -> None:
    """A run that has gone back to a checkpoint uses the same engines."""
    both = Graph(nodes=(NODE, replace(NODE, name="greedy")))
    started: list[str] = []

    def run_closing(graph: Graph, edges: Any, on_output: Callable[[str, Any], None]) -> dict[str, float]:
        for node in graph.nodes:
            started.append(node.name)
            ahead.close()
            on_output(node.name, None)
        return {}

    ahead = Harness(Overlap(max_staleness=1)).ahead(both, run_closing)
    with pytest.raises(EngineError, match="the run has ended"):
        ahead._nodes.run([0])
    assert started == ["rollouts"]


def test_an_error_of_the_generating_thread_is_raised_where_the_run_waits() -> None:
    Flaky.failing = frozenset(range(1, 100))
    with pytest.raises(EngineError, match="it died"):
        run(Overlap(max_staleness=1))


def test_new_engines_get_weights_only_between_two_steps() -> None:
    """New engines in place of failed ones get the weights of the trained role once it does not train."""
    Flaky.failing = frozenset({3, 4})
    options: list[Any] = ["wait", "keep"]
    for in_flight in options:
        overlap = Overlap(max_staleness=2, in_flight=in_flight, deterministic=False)
        harness, _ = run(overlap, (20,) * STEPS, engines=1)
        assert len(harness.syncs) > STEPS or in_flight == "wait"


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_shared_engines_that_wait_generate_all_steps_of_a_version_in_one_turn(staleness: int) -> None:
    """The steps between two turns need no weights."""
    harness, metrics = run(Overlap(max_staleness=staleness), shared=True)
    turns = range(0, STEPS, staleness + 1)
    assert versions_of(harness) == [[step - step % (staleness + 1)] for step in range(STEPS)]
    assert harness.syncs == [*turns, *([STEPS] if STEPS not in turns else [])]
    assert [line["overlap/staleness_max"] for line in metrics] == [step % (staleness + 1) for step in range(STEPS)]


def test_shared_engines_fill_the_end_of_a_turn_with_later_steps() -> None:
    """A turn ends with its step, and the next turn continues what it has left unfinished."""
    for staleness in (1, 2):
        overlap = Overlap(max_staleness=staleness, in_flight="keep", deterministic=False)
        harness, _ = run(overlap, (20,) * STEPS, shared=True, engines=1)
        older = [(step - out.versions.values).max() for step, out in enumerate(harness.trained)]
        assert 1 <= max(older) <= staleness
        # A turn first generates its own step: the first step has all of its tokens from its own turn.
        assert versions_of(harness)[0] == [0]
        mixed = [len(set(out.versions[row].tolist())) > 1 for out in harness.trained for row in range(len(out))]
        assert any(mixed)


SCHEDULES = st.tuples(
    st.integers(1, 4),
    st.sampled_from([("wait", True), ("wait", False), ("keep", False)]),
    st.integers(1, 3),
    st.lists(st.integers(0, 40), min_size=STEPS, max_size=STEPS),
    st.frozensets(st.integers(1, 60), max_size=2),
    st.integers(2, 8),
    st.integers(1, STEPS - 1),
    st.booleans(),
)


def play(schedule: Any) -> None:
    """Train with random delays, failures and a resume; without an answer it would hang."""
    staleness, (in_flight, deterministic), engines, delays, failing, room, stop, shared = schedule
    overlap = Overlap(max_staleness=staleness, in_flight=in_flight, deterministic=deterministic)
    Flaky.calls, Flaky.failing = 0, failing
    harness = Harness(overlap, engines, (room, 10_000), shared=shared)
    ahead = harness.ahead()
    # Only an exact version that is gone ends a run.
    with suppress(EngineError) if deterministic and not shared else nullcontext():
        harness.train(ahead, stop, delays)
        with TemporaryDirectory() as folder:
            ahead.save(Path(folder))
            ahead.close()
            ahead = harness.ahead()
            ahead.restore(Path(folder))
        harness.train(ahead, STEPS, delays)
    ahead.close()
    harness.check()
    assert (deterministic and not shared) or len(harness.trained) == STEPS
    if shared and in_flight == "wait":
        assert versions_of(harness) == [[step - step % (staleness + 1)] for step in range(STEPS)]


@pytest.mark.slow
@given(schedule=SCHEDULES)
@settings(max_examples=15)
def test_random_schedules_never_exceed_the_bound(schedule: Any) -> None:
    play(schedule)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@given(schedule=SCHEDULES)
@settings(max_examples=1000)
def test_a_thousand_random_schedules_never_exceed_the_bound(schedule: Any) -> None:
    play(schedule)
