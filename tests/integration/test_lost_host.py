"""A host that is lost in the middle of a run with ``elastic``, which continues on the others."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rlflow
from rlflow.compiler.plan import read_plan
from rlflow.report.records import MetricsWriter, SampleLog
from rlflow.resources.cluster import Cluster
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.ray.cluster import connection
from rlflow.runtime.ray.cluster.hosts import live_hosts
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import Warnings, load
from tests.integration.test_lost_workers import written

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]
ELASTIC = ("recipe=real", "steps=4", "elastic=true", "roles.rollout.colocate=[]")


class KillHost(Warnings):
    """An observer that kills the host of the rollout role after a step, with all processes there."""

    def __init__(self, started: list[Any]) -> None:
        super().__init__()
        self._started = started

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3 and not self.texts:
            ids = {host.name: host.node_id for host in live_hosts()}
            (node,) = [node for node in self._started[-1].worker_nodes if node.node_id == ids["host-1"]]
            for process in node.all_processes["raylet"]:
                process.process.kill()


def test_the_run_continues_on_the_hosts_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load(*ELASTIC, config_dir=CONFIG_DIR)
    plan = rlflow.compile(recipe, "3x1@cpu")
    assert {bundle.host for bundle in plan.roles["rollout"].bundles} == {"host-1"}
    assert {bundle.host for role in ("actor", "reference") for bundle in plan.roles[role].bundles} == {"host-0"}
    simulated, started = connection.simulated, []

    @contextmanager
    def simulated_and_noted(cluster: Cluster) -> Iterator[Any]:
        with simulated(cluster) as processes:
            started.append(processes)
            yield processes

    monkeypatch.setattr(connection, "simulated", simulated_and_noted)
    kill = KillHost(started)
    report = run(plan, tmp_path / "run", RayRuntime(), [MetricsWriter(), SampleLog(), kill])
    assert report.restarts == 1
    (text,) = kill.texts
    assert "Lost: host 'host-1'. The run is planned again for 2x1@cpu (" in text
    assert text.endswith("and the run continues from step 2.")
    assert read_plan(tmp_path / "run" / "plan.json").cluster.shape == "2x1@cpu"
    local = rlflow.compile(load("recipe=real", "steps=4", config_dir=CONFIG_DIR), "local")
    run(local, tmp_path / "expected", LocalRuntime(), [MetricsWriter(), SampleLog()])
    assert written(tmp_path / "run") == written(tmp_path / "expected")
