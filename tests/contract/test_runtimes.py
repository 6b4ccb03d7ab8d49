"""What every runtime must do, wherever its workers live."""

from pathlib import Path

import pytest

import rlflow
from rlflow.compiler.lower import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.engines.base import CAPABILITIES
from rlflow.errors import PlacementError
from rlflow.runtime.base import Runtime
from rlflow.runtime.local import LocalRuntime
from tests.conftest import CONFIG_DIR

RUNTIMES = [LocalRuntime()]


def plan_of(cluster: str, *overrides: str) -> Plan:
    return rlflow.compile(rlflow.load(["recipe=fake", *overrides], CONFIG_DIR), cluster)


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: type(runtime).__name__)
class TestRuntime:
    def test_every_role_has_an_engine_that_can_what_is_asked(self, runtime: Runtime, tmp_path: Path) -> None:
        plan = plan_of("local")
        runtime.check(plan)
        with runtime.start(plan, models_in_use(plan.recipe), tmp_path) as engines:
            assert engines.keys() == plan.roles.keys()
            for role, engine in engines.items():
                for capability in plan.graph.capabilities(role):
                    assert isinstance(engine, CAPABILITIES[capability])


def test_the_local_runtime_has_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.runtime.local.gpus_of_this_machine", list)
    with pytest.raises(PlacementError, match="the plan is for 1x1@h100_80gb, and this machine has no GPU"):
        LocalRuntime().check(plan_of("1x1"))
