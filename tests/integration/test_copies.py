"""Weight syncs between processes, of which some fail or hang."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray

import rlflow
from rlflow.compiler.models import models_in_use
from rlflow.engines.base import EngineSpec, GpuTransport, Sampling
from rlflow.engines.buckets import Bucket
from rlflow.errors import EngineError
from rlflow.runtime.ray.role_workers import RoleWorkers
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.ray.worker import EngineWorker
from rlflow.runtime.weights import sync
from rlflow.runtime.weights.gpu import Receivers
from tests.conftest import CONFIG_DIR
from tests.helpers import load, prompts

SHARED_PROCESSES = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Failing(EngineWorker):
    """A worker whose rank 1 fails as often as its folder has files, in the ways that their names say."""

    folder: Path

    def build(self, engine: str, spec: EngineSpec) -> None:
        super().build(engine, spec)
        # These stand for vLLM's transports from GPU to GPU, because there are no GPUs here.
        self._engine.transfer = lambda method, arguments: self._maybe("transfer_hangs")
        self._engine.finish_transfer = lambda version: setattr(self._engine, "_version", version)

    def disconnect_receivers(self) -> None:
        self._maybe("forgetting_hangs")
        super().disconnect_receivers()

    def send_gpu_to_gpu(self, transport: GpuTransport, receivers: Receivers, rank: int, address: str) -> None:
        if rank == 0:
            receivers.start_weight_update()

    def receive_weights(self, version: int) -> None:
        self._maybe("fails", "dies", "hangs")
        super().receive_weights(version)

    def next_bucket(self) -> tuple[Bucket | None, bool]:
        self._maybe("source_fails", "source_hangs")
        return super().next_bucket()

    def _maybe(self, *kinds: str) -> None:
        if self._engine._spec.rank != 1:
            return
        for file in sorted(self.folder.iterdir()):
            kind = file.name.partition("-")[0]
            if kind in kinds:
                file.unlink()
                if kind == "dies":
                    os._exit(1)
                if kind.endswith("hangs"):
                    threading.Event().wait()
                raise EngineError(f"it {kind}")


@pytest.fixture(scope="module", autouse=True)
def workers_of_this_module(hosts: None) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@contextmanager
def engines(folder: Path) -> Iterator[tuple[Mapping[str, Any], Callable[..., None]]]:
    """Start two engines that follow a role of two ranks, and yield them with a function that makes calls fail."""
    pins = ["roles.actor.gpus=2", "roles.rollout.gpus=2", "algorithm=dr_grpo", "~roles.reference"]
    plan = rlflow.compile(load("recipe=fake", *pins, config_dir=CONFIG_DIR), "2x1@cpu")
    waiting = folder / "failures"
    waiting.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Failing, "folder", waiting, raising=False)
        patch.setattr("rlflow.runtime.ray.role_workers.EngineWorker", Failing)
        with RayRuntime().start(plan, models_in_use(plan.recipe), folder) as started:

            def fail(*kinds: str) -> None:
                assert not list(waiting.iterdir()), "an earlier failure has not happened"
                for index, kind in enumerate(kinds):
                    (waiting / f"{kind}-{index}").touch()

            yield started, fail


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, workers_of_this_module: None
) -> Iterator[tuple[Mapping[str, Any], Callable[..., None]]]:
    """Start engines for the tests that leave them usable."""
    with engines(tmp_path_factory.mktemp("shared")) as started:
        yield started


def versions(rollout: Any) -> set[int]:
    return set(rollout.generate(prompts((2, 2, 2, 2)), Sampling(max_tokens=2)).versions.values.tolist())


def test_copies_that_fail(shared: tuple[Mapping[str, Any], Callable[..., None]]) -> None:
    """Once and twice, the second time with a new engine, they go through; three times are an error."""
    started, fail = shared
    rollout, source = started["rollout"], started["actor"].weights()
    good, failing = rollout.workers.actors
    kinds = [(), ("fails",), ("fails", "fails"), ("dies",), ("source_fails",), ("source_fails", "fails"), ()]
    for version, failures in enumerate(kinds, start=1):
        fail(*failures)
        rollout.load_weights(source, version)
        assert versions(rollout) == {version}, failures
        replaced = rollout.workers.actors[1] != failing
        assert replaced == (failures in (("fails", "fails"), ("dies",))), failures
        assert rollout.workers.actors[0] == good, "an engine that has not failed goes on"
        failing = rollout.workers.actors[1]
    for kind in ("fails", "source_fails"):
        fail(kind, kind, kind)
        with pytest.raises(EngineError, match=f"it {kind}"):
            rollout.load_weights(source, 20)
    rollout.load_weights(source, 21)
    assert versions(rollout) == {21}


@pytest.mark.soak
def test_copies_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does is replaced where the copy can be tried again; else it is named, and nobody waits for it."""
    silent = "weight sync: no progress for 6 s. No answer from "
    with engines(tmp_path) as (started, fail):
        rollout, source = started["rollout"], started["actor"].weights()
        rollout.load_weights(source, 1)

        def restart(ranks: Sequence[int]) -> None:
            """Restart with a longer limit, because new processes have libraries to load."""
            monkeypatch.setattr(sync, "LIMIT_S", 60.0)
            assert ranks == [1], "the engine that hangs is replaced alone"
            RoleWorkers.restart(rollout.workers, ranks)

        monkeypatch.setattr(rollout.workers, "restart", restart)
        monkeypatch.setattr(sync, "LIMIT_S", 6.0)
        attempts = Mock(wraps=sync._sync_by_buckets)
        monkeypatch.setattr(sync, "_sync_by_buckets", attempts)
        fail("hangs")
        rollout.load_weights(source, 2)
        assert versions(rollout) == {2}
        assert attempts.call_count == 2, "one that was ended takes nothing over"
        rollout.workers.gpu_transport = "ipc"
        rollout.load_weights(source, 3)
        assert versions(rollout) == {3}
        monkeypatch.setattr(sync, "LIMIT_S", 6.0)
        fail("transfer_hangs")
        with pytest.raises(EngineError) as error:
            rollout.load_weights(source, 4)
        names = "role actor: worker 0 on host-0; role rollout: worker 1 on host-1."
        assert str(error.value) == silent + names
        with pytest.raises(EngineError, match="worker 1 on host-1 did not answer for 6 s during a weight sync"):
            rollout.generate(prompts((2, 2)), Sampling(max_tokens=2))


def check_that_a_hanging_source_is_named(
    started: Mapping[str, Any], transport: GpuTransport | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no engine is replaced either, since a new one would have nothing to load."""
    rollout, source = started["rollout"], started["actor"].weights()
    rollout.workers.gpu_transport = transport
    restart = Mock()
    monkeypatch.setattr(rollout.workers, "restart", restart)
    monkeypatch.setattr(sync, "LIMIT_S", 6.0)
    with pytest.raises(EngineError, match=r"No answer from role actor: worker 1 on host-1\.$"):
        rollout.load_weights(source, 1)
    assert not restart.called


@pytest.mark.soak
def test_a_source_that_hangs_over_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines(tmp_path) as (started, fail):
        fail("forgetting_hangs")
        check_that_a_hanging_source_is_named(started, "ipc", monkeypatch)


# The last test: the engines are not usable after it.
def test_a_source_that_hangs(
    shared: tuple[Mapping[str, Any], Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, fail = shared
    fail("source_hangs")
    check_that_a_hanging_source_is_named(started, None, monkeypatch)
