"""The processes of an engine over two hosts: one on each, which start, end and are replaced together."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest

import rlflow
from rlflow.errors import EngineError
from rlflow.runtime.objects.store_usage import StoreUsage
from rlflow.runtime.ray.cluster.binding import BoundPlan
from rlflow.runtime.ray.role_workers import RoleWorkers
from tests.helpers import load
from tests.unit.runtime.ray.cluster.test_binding import live

# Calls that last as long as the process.
LASTING = ("stay", "follow")


class Process:
    """Stands in for a process: most calls are done at once."""

    def __init__(self, kind: Any, options: Any, name: str, *others: Any) -> None:
        self.name = name
        self.calls: dict[str, tuple[Any, ...]] = {}
        self.lasting: Future[Any] = Future()
        self.ends: list[str] = []
        self.is_killed = False

    def call(self, wait: Any, method: str, *arguments: Any) -> "Future[Any]":
        self.calls[method] = arguments
        if method in LASTING:
            return self.lasting
        done: Future[Any] = Future()
        done.set_result(4001 if method == "free_port" else None)
        return done

    def end(self, error: EngineError) -> None:
        self.ends.append(str(error))

    def kill(self) -> None:
        self.is_killed = True


class Thread:
    """Stands in for a thread, and is done when it has started."""

    def __init__(self, target: Callable[..., None], args: Sequence[Any], daemon: bool) -> None:
        self._target, self._arguments = target, args

    def start(self) -> None:
        self._target(*self._arguments)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> RoleWorkers:
    """Return the workers of a role whose only engine has a stage on each of two hosts."""
    monkeypatch.setattr("rlflow.runtime.ray.role_workers.RemoteProcess", Process)
    monkeypatch.setattr("rlflow.runtime.ray.role_workers.Thread", Thread)
    plan = rlflow.compile(load("recipe=grpo_tiny_cluster", "roles.rollout.pipeline_parallel_size=2"), "2x1@cpu")
    bundles = plan.roles["rollout"].bundles
    assert [bundle.host for bundle in bundles] == ["host-0", "host-1"]
    bound = BoundPlan(
        group=Mock(),
        bundle_indices={bundle: index for index, bundle in enumerate(bundles)},
        gpu_ids=dict.fromkeys(bundles, "0"),
        hosts={name: live(name, simulated=True) for name in ("host-0", "host-1")},
    )
    workers = RoleWorkers(plan, "rollout", plan.recipe.models["policy"], bound, StoreUsage({}), Mock())
    workers.start()
    return workers


def parts(engine: RoleWorkers) -> list[Any]:
    return [engine._processes[0], *engine._followers[0]]


def test_its_hosts_meet_at_the_first(engine: RoleWorkers) -> None:
    first, second = parts(engine)
    assert len(engine) == 1
    assert [part.name for part in (first, second)] == [f"role rollout: worker 0 on host-{host}" for host in (0, 1)]
    (_, built), (_, followed) = first.calls["build"], second.calls["follow"]
    assert (built.host_rank, followed.host_rank) == (0, 1)
    assert built.address == followed.address == f"{engine.address}:4001"
    for part, host in ((first, "host-0"), (second, "host-1")):
        (variables,) = part.calls["prepare"]
        assert variables["VLLM_HOST_IP"] == engine._bound.addresses[host]


@pytest.mark.parametrize("place", [0, 1])
def test_they_end_together(engine: RoleWorkers, place: int) -> None:
    both = parts(engine)
    both[place].lasting.set_exception(EngineError("it died"))
    assert [part.ends for part in both] == [["it died"]] * 2


def test_they_are_replaced_together(engine: RoleWorkers) -> None:
    """The end of a part that was replaced says nothing about the new engine."""
    before = parts(engine)
    engine.restart([0])
    after = parts(engine)
    assert all(part.is_killed for part in before)
    assert not {*before} & {*after}
    before[1].lasting.set_exception(EngineError("it was killed"))
    assert all(part.ends == [] for part in (*before, *after))
    engine.stop()
    assert all(part.is_killed for part in after)
