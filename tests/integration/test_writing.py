"""Engines in processes of their own that take samples while they write, of which one dies or hangs."""

import gc
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

import rlflow
from rlflow.batch import Rollouts
from rlflow.compiler.graph import Graph
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.fake import FakeEngine
from rlflow.recipe.compose import load_cluster
from rlflow.runtime.generation.streaming_nodes import StreamingNodes
from rlflow.runtime.graph_runner import GraphRunner
from rlflow.runtime.ray.cluster.connection import simulated
from rlflow.runtime.ray.engine_set import RayEngines
from rlflow.runtime.ray.role_workers import RoleWorkers
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.ray.worker import EngineWorker
from tests import helpers
from tests.conftest import CONFIG_DIR
from tests.helpers import WritingEngine, load, prompts, spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Worker(EngineWorker):
    """A worker whose engine takes samples while it generates.

    While ``file`` exists, the fault that it names happens to the process of rank 1 when it is given samples.
    """

    file: Path

    def build(self, engine: str, spec: EngineSpec) -> None:
        assert os.environ["GOMP_SPINCOUNT"] == "10000"
        assert "torch" not in sys.modules, "libraries read their variables when they are imported"
        super().build(engine, spec)
        if spec.role == "rollout":
            self._engine_thread = None
            self._engine = WritingEngine(spec)

    def call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        if method == "advance" and self._engine._spec.rank == 1 and self.file.exists():
            fault = self.file.read_text()
            self.file.unlink()
            if fault == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault != "dies":
                threading.Event().wait()
            os._exit(1)
        return super().call(method, *arguments, **named)


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """Start hosts whose workers load their libraries themselves."""
    with simulated(load_cluster("2x1@cpu")):
        yield


@pytest.fixture(scope="module", autouse=True)
def workers_of_this_module(hosts: None) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.cloudpickle.register_pickle_by_value(helpers)


@dataclass(frozen=True)
class Started:
    """The engines of a plan, which all tests share."""

    plan: Plan
    engines: RayEngines
    folder: Path


@pytest.fixture(scope="module")
def started(workers_of_this_module: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    pins = ["roles.rollout.gpus=2", "roles.actor.gpus=2", "algorithm=dr_grpo", "~roles.reference"]
    plan = rlflow.compile(load("recipe=fake", *pins, config_dir=CONFIG_DIR), "2x1@cpu")
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "file", folder / "fault", raising=False)
        patch.setattr("rlflow.runtime.ray.role_workers.EngineWorker", Worker)
        patch.setattr(RoleWorkers, "concurrent", property(lambda actors: actors._role == "rollout"))
        patch.setattr("rlflow.runtime.ray.watchdog.LOOK_S", 0.1)
        patch.setattr("rlflow.runtime.ray.watchdog.ASK_S", 0.5)
        patch.setattr("rlflow.runtime.ray.watchdog.NO_STEP_S", 3.0)
        patch.setattr("rlflow.runtime.ray.waits.SILENCE_S", (4.0, 30.0))
        with RayRuntime().start(plan, models_in_use(plan.recipe), folder) as engines:
            assert isinstance(engines, RayEngines)
            yield Started(plan, engines, folder)


def test_rewards_of_parts_are_those_of_the_whole(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results lie in the stores before the end, and nothing of them is left there after it."""
    parts: list[int] = []
    add = StreamingNodes.receive

    def counted(stream: StreamingNodes, rank: int, part: Rollouts) -> None:
        parts.append(len(part))
        add(stream, rank, part)

    monkeypatch.setattr(StreamingNodes, "receive", counted)
    nodes = tuple(node for node in started.plan.graph.nodes if node.name in ("rollouts", "rewards", "advantages"))
    made = []
    for wait_s in (0.0, 3600.0):
        monkeypatch.setattr("rlflow.runtime.generation.early_results._MIN_SECONDS", wait_s)
        outputs: dict[str, Any] = {}
        graph = Graph(nodes=nodes)
        GraphRunner(graph, started.engines).run(graph, {"prompts": prompts((2, 3) * 8)}, outputs.__setitem__)
        rollouts = outputs["rollouts"]
        judged = [outputs["rewards"].values.tolist(), outputs["advantages"].values.run_values.tolist()]
        made.append((rollouts.response_ids.values.tolist(), judged, list(rollouts.texts)))
        del outputs, rollouts
    assert made[0] == made[1]
    assert sum(parts) <= len(made[0][2])
    assert len(parts) > 4
    gc.collect()
    assert set(started.engines.store_usage.used.values()) == {0}


@pytest.mark.parametrize(
    "fault", ["dies", *(pytest.param(fault, marks=pytest.mark.soak) for fault in ("hangs", "stops"))]
)
def test_an_engine_that_fails_is_replaced(fault: str, started: Started) -> None:
    """The others generate its samples, and it generates again when it has the weights."""
    given, sampling = prompts((2,) * 8), Sampling(max_tokens=3, group_size=2)
    expected = FakeEngine(spec()).generate(given, sampling).response_ids.values.tolist()
    record, engines = started.folder / "engines.jsonl", started.engines
    engines.step_metrics(0)
    earlier = len(record.read_text().splitlines()) if record.exists() else 0
    rollout, source = engines["rollout"], engines["actor"].weights()
    good, failing = rollout.workers.actors
    for version, fails in enumerate((False, True, False), start=1):
        rollout.load_weights(source, version)
        if fails:
            Worker.file.write_text(fault)
        for _ in range(2):
            out = rollout.generate(given, sampling)
            assert out.response_ids.values.tolist() == expected
            assert set(out.versions.values.tolist()) == {version}
        assert engines.step_metrics(version)["rollout/engines/replaced"] == fails
    assert not Worker.file.exists()
    lines = [json.loads(line) for line in record.read_text().splitlines()[earlier:]]
    (failed,) = [line for line in lines if "failed" in line]
    why = {
        "dies": "died: ",
        "hangs": r"\(pid \d+\) has made no step for 3 s",
        "stops": r"\(pid \d+\) has .* for [34] s",
    }
    assert re.match(f"role rollout: worker 1 on host-1 {why[fault]}", failed["failed"])
    lines.remove(failed)
    engines_of_step = [{line["engine"] for line in lines if line["step"] == step} for step in (1, 2, 3)]
    assert engines_of_step == [{0, 1}, {0}, {0, 1}]
    assert rollout.workers.actors[0] == good, "the engine that fails is replaced alone"
    assert rollout.workers.actors[1] != failing
    if fault == "dies":
        for actor in rollout.workers.actors:
            ray.kill(actor)
        out = rollout.generate(given, sampling)
        assert out.response_ids.values.tolist() == expected
        assert set(out.versions.values.tolist()) == {3}, "new engines have the weights in force"
        assert engines.step_metrics(4)["rollout/engines/replaced"] == 2
