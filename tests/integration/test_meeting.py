"""Workers of a role that join_process_group at a port which another process has taken in the meantime."""

import socket
import sys
from pathlib import Path

import pytest
import ray

import rlflow
from rlflow.compiler.models import models_in_use
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.sharded.process_group import join_process_group
from rlflow.errors import EngineError
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.ray.worker import EngineWorker
from tests.conftest import CONFIG_DIR
from tests.helpers import load, prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
SHARED_PROCESSES = "hosts"


class Meeting(EngineWorker):
    """A worker of the role rollout whose port is taken as often as there are files in the folder."""

    folder: Path

    def free_port(self) -> int:
        for file in sorted(self.folder.iterdir())[:1]:
            file.unlink()
            self._other = socket.create_server(("", 0))
            port: int = self._other.getsockname()[1]
            return port
        return super().free_port()

    def build(self, engine: str, spec: EngineSpec) -> None:
        if spec.role == "rollout":
            join_process_group(spec)
        super().build(engine, spec)


def test_a_port_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: None) -> None:
    """Once is no matter; as often as is tried, it is an error."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    recipe = load("recipe=fake", "algorithm=dr_grpo", "~roles.reference", config_dir=CONFIG_DIR)
    plan = rlflow.compile(recipe, "1x1@cpu")
    taken = tmp_path / "taken"
    taken.mkdir()
    monkeypatch.setattr(Meeting, "folder", taken, raising=False)
    monkeypatch.setattr("rlflow.runtime.ray.role_workers.EngineWorker", Meeting)
    monkeypatch.setattr("rlflow.runtime.ray.role_workers._PORT_ATTEMPTS", 2)
    with RayRuntime().start(plan, models_in_use(plan.recipe), tmp_path) as engines:
        rollout = engines["rollout"]
        (taken / "once").touch()
        rollout.workers.restart([0])
        assert not list(taken.iterdir())
        assert len(rollout.generate(prompts((2, 2)), Sampling(max_tokens=2))) == 2
        for index in range(2):
            (taken / str(index)).touch()
        with pytest.raises(EngineError, match=r"role rollout: worker 0 .*(EADDRINUSE|ddress already in use)"):
            rollout.workers.restart([0])
