"""Whole runs in turns with an environment, in this process and on simulated hosts."""

import json
from pathlib import Path
from typing import Any

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.errors import EngineError, RecipeError
from rlflow.report.records import MetricsWriter
from rlflow.runtime.prepare import runtime_of
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import load

SHARED_PROCESSES = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = "tests.unit.environments.misbehaving"


def plan_of(*overrides: str, cluster: str = "local") -> Plan:
    return rlflow.compile(load("recipe=turns", *overrides, config_dir=CONFIG_DIR), cluster)


def metrics(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """Run a plan, and return the metrics of rollouts, rewards and evaluations by step."""
    assert run(plan, folder, runtime_of(plan), [MetricsWriter()]).status == "finished"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("rollouts/", "rewards/", "evaluation/", "step")
    return [{name: value for name, value in line.items() if name.startswith(names)} for line in lines]


@pytest.mark.soak
@pytest.mark.usefixtures("hosts")
def test_hosts_say_what_one_process_says(tmp_path: Path) -> None:
    """Tokens of conversations stay in the stores of hosts, and the same is said."""
    alone = metrics(plan_of(), tmp_path / "alone")
    steps = [line for line in alone if "rollouts/turns_mean" in line]
    assert len(steps) == 6
    assert any(1 < line["rollouts/turns_mean"] < 3 for line in steps)
    assert len([line for line in alone if "evaluation/reward" in line]) == 4
    pins = ["roles.rollout.gpus=2", "roles.rollout.tensor_parallel_size=1"]
    hosts = metrics(plan_of(*pins, cluster="2x1@cpu"), tmp_path / "hosts")
    assert hosts == alone


FAILING = [f"graph.rollouts.environment={HERE}:Misbehaving", "~graph.rollouts.options"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            ['graph.rollouts.stop=["12"]'],
            RecipeError,
            r"graph.rollouts.stop: expected a single token, got '12', which is 2",
        ),
        (FAILING, RecipeError, r"graph.rollouts.environment: '.*:Misbehaving' failed \(KeyError: "),
        (
            [*FAILING, "+graph.rollouts.on_failure=exclude"],
            EngineError,
            r"none of \d+ responses has one: '.*:Misbehaving' failed \(KeyError: ",
        ),
    ],
)
def test_what_ends_a_run(options: list[str], kind: type[Exception], message: str, tmp_path: Path) -> None:
    plan = plan_of(*options)
    with pytest.raises(kind, match=message):
        run(plan, tmp_path / "run", runtime_of(plan))
