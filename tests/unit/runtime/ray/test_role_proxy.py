"""Many workers as one engine: here threads of this process with the fake engine and with torch's."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Metrics, Minibatch, Packed, Prompts, Rewards, Rollouts, Sequences
from rlflow.engines.base import Sampling, TokenLoss
from rlflow.engines.fake import FakeEngine
from rlflow.errors import EngineError
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.resources.layout import Layout
from rlflow.runtime.objects.slices import BatchSlice
from rlflow.runtime.protocols import Workers
from rlflow.runtime.ray.gpu_turns import GpuTurns
from rlflow.runtime.ray.role_proxy import RoleProxy
from rlflow.runtime.ray.worker import EngineWorker
from tests.helpers import WritingEngine, minibatch, prompts, sequences, spec

LAYOUT = Layout(micro_batch_tokens=4096)


class Threads:
    """Workers in this process, a thread each."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines
        self.calls: list[tuple[int, str]] = []
        self.dead: list[int] = []
        self.restarted: list[int] = []
        self._pools = [ThreadPoolExecutor(8) for _ in engines]

    def __len__(self) -> int:
        return len(self.engines)

    def submit(self, rank: int, method: str, *arguments: Any, wanted: bool = True) -> "Future[Any]":
        self.calls.append((rank, method))
        given = [argument.batch if isinstance(argument, BatchSlice) else argument for argument in arguments]
        call = self._pools[rank].submit(getattr(self.engines[rank], method), *given)
        if wanted:
            return call
        nothing: Future[Any] = Future()
        call.add_done_callback(lambda done: nothing.set_result(None) if not done.exception() else None)
        return nothing

    def restart(self, ranks: Sequence[int]) -> None:
        self.restarted += ranks
        for rank in ranks:
            self.engines[rank] = type(self.engines[rank])(spec())

    def dead_ranks(self) -> list[int]:
        return self.dead

    def sync_weights(self, source: Workers, version: int) -> None:
        assert isinstance(source, Threads)
        for engine in self.engines:
            engine.load_weights(source.engines[0].weights(), version)


def proxy(workers: Threads, layout: Layout = LAYOUT, concurrent: bool = False) -> RoleProxy:
    return RoleProxy("role", workers, layout, concurrent, GpuTurns({"role": workers}, {"role": []}))


class Dying(FakeEngine):
    """An engine that dies in a call."""

    def logprobs(self, *arguments: Any) -> Any:
        raise EngineError("role: worker 1 died.")


@pytest.mark.parametrize(("is_frozen", "dead"), [(True, [1]), (True, []), (False, [1])])
def test_only_a_frozen_role_that_has_lost_a_rank_repeats_the_call(is_frozen: bool, dead: list[int]) -> None:
    """New workers have the weights of the old ones. An engine that fails without dying would fail again."""
    workers = fakes(2)
    workers.engines[1].logprobs = Dying(spec()).logprobs
    workers.dead = dead
    turns = GpuTurns({"role": workers}, {"role": []})
    role = RoleProxy("role", workers, LAYOUT, False, turns, is_frozen=is_frozen)
    given = sequences((3, 5), [[4, 2], [3, 6]])
    if not (is_frozen and dead):
        with pytest.raises(EngineError, match="worker 1 died"):
            role.logprobs(given, 1.0)
        return
    expected = FakeEngine(spec()).logprobs(given, 1.0).values
    assert role.logprobs(given, 1.0).values.values.tolist() == expected.values.tolist()
    assert workers.restarted == [0, 1]
    assert role.take_failures() == [{"engine": 1, "failed": "role: worker 1 died."}]


def fakes(count: int) -> Threads:
    return Threads([FakeEngine(spec()) for _ in range(count)])


@pytest.mark.parametrize("room", [None, 1, 4, 100])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_responses_do_not_depend_on_the_number_of_workers(count: int, room: int | None) -> None:
    given, sampling = prompts((3, 5, 2, 4)), Sampling(max_tokens=4, group_size=3)
    alone = FakeEngine(spec()).generate(given, sampling)
    workers = fakes(count) if room is None else Threads([WritingEngine(spec(), (room, 1000)) for _ in range(count)])
    out = proxy(workers, concurrent=room is not None).generate(given, sampling)
    for name in ("keys", "finished"):
        assert (getattr(out, name) == getattr(alone, name)).all()
    for name in ("prompt_ids", "response_ids", "logprobs", "versions"):
        assert (getattr(out, name).values == getattr(alone, name).values).all()
        assert (getattr(out, name).offsets == getattr(alone, name).offsets).all()
    assert (tuple(out.texts), tuple(out.rows), out.temperature) == (alone.texts, alone.rows, alone.temperature)


class Forgetful(FakeEngine):
    """An engine that returns all rollouts but the last."""

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        rollouts = super().generate(prompts, sampling)
        return rollouts.take(np.arange(len(rollouts) - 1))


def test_a_worker_that_loses_a_sample_is_an_error() -> None:
    with pytest.raises(EngineError, match="returned 11 rollouts for 12 samples: 1 are missing"):
        proxy(Threads([FakeEngine(spec()), Forgetful(spec())])).generate(
            prompts((3, 5, 2, 4)), Sampling(max_tokens=4, group_size=3)
        )


class Recorder:
    """Keeps what it was given; its logprobs are the first tokens of the responses, as many as there are."""

    def __init__(self) -> None:
        self.given: list[Sequences] = []

    def logprobs(self, given: Sequences, temperature: float) -> Any:
        self.given.append(given)
        return type("Result", (), {"values": given.response_ids})

    def evaluate(self, given: Sequences) -> Rewards:
        self.given.append(given)
        return Rewards(values=np.add.reduceat(given.response_ids.values, given.response_ids.offsets[:-1]))

    def update(self, given: Minibatch, loss: TokenLoss) -> Metrics:
        self.given.append(given)
        return Metrics(values={"loss": 1.0})


@pytest.mark.parametrize(("count", "width"), [(1, 1), (2, 1), (4, 2), (3, 1), (6, 1)])
def test_scores_are_put_where_they_belong(count: int, width: int) -> None:
    given = sequences([3, 2, 4], [[4, 1], [2], [5, 5]])
    recorders = [Recorder() for _ in range(count)]
    out = proxy(Threads(recorders), replace(LAYOUT, sequence_parallel_size=width)).logprobs(given, 1.0).values
    assert (out.values == given.response_ids.values).all()
    assert (out.offsets == given.response_ids.offsets).all()
    assert all(len(recorder.given) == 1 for recorder in recorders), "a rank that is not called would hang the others"


@pytest.mark.parametrize(("count", "width"), [(1, 1), (2, 1), (4, 2), (7, 1)])
def test_all_workers_evaluate(count: int, width: int) -> None:
    given = sequences([3, 2, 4], [[4, 1], [2], [5, 5]])
    recorders = [Recorder() for _ in range(count)]
    out = proxy(Threads(recorders), replace(LAYOUT, sequence_parallel_size=width)).evaluate(given)
    assert out.values.tolist() == [sum(given.response_ids[row]) for row in range(5)]
    sizes = [len(each) for recorder in recorders[: 5 * width : width] for each in recorder.given]
    assert (sum(sizes), min(sizes), len(sizes)) == (5, 5 // len(sizes), min(5, count // width))


def test_a_reward_for_each_rollout() -> None:
    given = sequences([3, 2], [[4], [2]])
    recorders = [Recorder(), Recorder()]
    recorders[1].evaluate = lambda given: Rewards(values=np.zeros(0, np.float32))  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="role role: worker 1 has evaluated 0 of 1 responses"):
        proxy(Threads(recorders)).evaluate(given)


def test_neighbours_in_sequence_parallelism_have_the_same_rows() -> None:
    recorders = [Recorder() for _ in range(4)]
    layout = replace(LAYOUT, sequence_parallel_size=2, data_parallel_size=2)
    proxy(Threads(recorders), layout).update(minibatch(sequences([3, 2], [[4], [2]])), LikelihoodLoss())
    rows = [recorder.given[0].keys[:, 1].tolist() for recorder in recorders]
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
    assert sorted(rows[0] + rows[2]) == [0, 1]


def test_a_rank_without_rows_trains_on_nothing() -> None:
    recorders = [Recorder() for _ in range(3)]
    proxy(Threads(recorders)).update(minibatch(sequences([3, 2], [[4], [2]])), LikelihoodLoss())
    parts: list[Any] = [recorder.given[0] for recorder in recorders]
    assert sum(float(part.weights.values.sum()) for part in parts) == pytest.approx(1.0)
    assert [float(part.weights.values.sum()) > 0 for part in parts] == [True, True, False]


class TestWeights:
    def leader(self) -> Threads:
        leader = fakes(1)
        leader.engines[0].update(minibatch(sequences([3], [[4]])), LikelihoodLoss())
        return leader

    def test_all_workers_have_the_version(self) -> None:
        followers = fakes(2)
        follower = proxy(followers)
        follower.load_weights(proxy(self.leader()).weights(), 3)
        out = follower.generate(prompts(), Sampling(max_tokens=3))
        assert set(out.versions.values.tolist()) == {3}


class TestWorker:
    """The process that holds an engine."""

    def worker(self, engine: str = "fake") -> EngineWorker:
        worker = EngineWorker()
        worker.build(engine, spec())
        return worker

    def test_weights_go_from_one_to_another(self) -> None:
        source, target = self.worker(), self.worker()
        source.call("update", minibatch(sequences([3], [[4]])), LikelihoodLoss())
        source.start_sending(copy_data=True)
        target.start_receiving()
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(target.receive_weights, 4)
            more = True
            while more:
                bucket, more = source.next_bucket()
                target.push_bucket(deepcopy(bucket))
            taken.result(timeout=20)
        out = target.call("generate", prompts(), Sampling(max_tokens=3))
        assert set(out.versions.values.tolist()) == {4}
        assert source.call("update", minibatch(sequences([3], [[4]])), LikelihoodLoss()).values["loss"] == 1 / 2

    def test_an_interrupted_weight_sync_is_an_error_at_once(self) -> None:
        target = self.worker("transformers")
        target.start_receiving()
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(target.receive_weights, 4)
            target.push_bucket("the source died")
            with pytest.raises(EngineError, match="the source died"):
                taken.result(timeout=20)
            pool.submit(target.push_bucket, None).result(timeout=20)
        with pytest.raises(EngineError, match="the last weight sync failed"):
            target.call("generate", prompts(), Sampling(max_tokens=3))

    def test_an_engine_is_called_from_one_thread(self) -> None:
        worker = self.worker()
        threads: set[int] = set()
        worker._engine.mark = lambda: threads.add(threading.get_ident())
        with ThreadPoolExecutor(4) as pool:
            for call in [pool.submit(worker.call, "mark") for _ in range(8)]:
                call.result(timeout=20)
        assert len(threads) == 1


def test_packed_rows_join() -> None:
    parts = [Packed.from_rows([[1, 2], [3]], np.int32), Packed.from_rows([[], [4]], np.int32)]
    joined = Packed.concatenate(parts)
    assert [row.tolist() for row in map(joined.__getitem__, range(4))] == [[1, 2], [3], [], [4]]
