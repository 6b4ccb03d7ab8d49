"""Copies of weights between processes, of which some fail."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

import rlflow
from rlflow.compiler.lower import models_in_use
from rlflow.engines.base import Sampling
from rlflow.engines.buckets import Bucket
from rlflow.errors import EngineError
from rlflow.runtime.cluster.hosts import simulated
from rlflow.runtime.ray import RayRuntime
from rlflow.runtime.workers.worker import EngineWorker
from tests.conftest import CONFIG_DIR
from tests.helpers import prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Failing(EngineWorker):
    """As often as there are files in its folder, the rank 1 of a role does what they are named after."""

    folder: Path

    def take_weights(self, version: int) -> float:
        self._maybe("fails", "dies")
        return super().take_weights(version)

    def next_bucket(self) -> tuple[Bucket | None, bool]:
        self._maybe("source_fails")
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
                raise EngineError(f"it {kind}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with simulated(rlflow.compile(rlflow.load(["recipe=fake"], CONFIG_DIR), "2x1@cpu").cluster):
        yield


@contextmanager
def engines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Mapping[str, Any], Callable[..., None]]]:
    """Two engines that follow a role of two ranks, and what puts failures in their way."""
    pins = [f"roles.{role}.gpus=2" for role in ("actor", "rollout", "reference")]
    plan = rlflow.compile(rlflow.load(["recipe=fake", *pins], CONFIG_DIR), "2x1@cpu")
    waiting = folder / "failures"
    waiting.mkdir()
    monkeypatch.setattr(Failing, "folder", waiting, raising=False)
    monkeypatch.setattr("rlflow.runtime.workers.actors.EngineWorker", Failing)
    with RayRuntime().start(plan, models_in_use(plan.recipe), folder) as started:

        def fail(*kinds: str) -> None:
            assert not list(waiting.iterdir()), "what was to fail has not"
            for index, kind in enumerate(kinds):
                (waiting / f"{kind}-{index}").touch()

        yield started, fail


def versions(rollout: Any) -> set[int]:
    return set(rollout.generate(prompts((2, 2, 2, 2)), Sampling(max_tokens=2)).versions.values.tolist())


@pytest.mark.usefixtures("hosts")
def test_copies_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once and twice, the second time with new engines, they go through; three times are an error."""
    with engines(tmp_path, monkeypatch) as (started, fail):
        rollout, source = started["rollout"], started["actor"].weights()
        kinds = [(), ("fails",), ("fails", "fails"), ("dies",), ("source_fails",), ("source_fails", "fails"), ()]
        for version, failures in enumerate(kinds, start=1):
            fail(*failures)
            rollout.load_weights(source, version)
            assert versions(rollout) == {version}, failures
        for kind in ("fails", "source_fails"):
            fail(kind, kind, kind)
            with pytest.raises(EngineError, match=f"it {kind}"):
                rollout.load_weights(source, 20)
        rollout.load_weights(source, 21)
        assert versions(rollout) == {21}
