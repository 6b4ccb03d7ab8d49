"""Training on pairs on two simulated hosts, sharded by DeepSpeed, equals training in this process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.recipe.evaluation import Evaluation
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import load

SHARED_PROCESSES = "hosts"
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600), pytest.mark.usefixtures("hosts")]


def plan_of(name: str, role: str, cluster: str, engine: str, *pins: str) -> Plan:
    optimizer = f"roles.{role}.optimizer={{learning_rate: 1.0e-2, schedule: constant, warmup_steps: 0}}"
    options = ["steps=3", "data.batch_size=6", f"roles.{role}.engine={engine}", optimizer]
    recipe = load(f"recipe={name}_tiny", *options, *pins)
    small = load("recipe=real", config_dir=CONFIG_DIR).models
    return rlflow.compile(replace(recipe, models=small, evaluation=Evaluation(every=3, num_prompts=20)), cluster)


def last(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step = [line for line in lines if "update/loss" in line][-1]
    evaluated = [line for line in lines if "evaluation/accuracy" in line][-1]
    return {name: step[f"update/{name}"] for name in ("loss", "accuracy", "margin")} | {"held out": evaluated}


@pytest.mark.parametrize(("name", "role"), [("dpo", "actor"), ("rm", "reward")])
def test_where_it_runs_makes_no_difference(name: str, role: str, tmp_path: Path) -> None:
    pins = [f"roles.{role}.gpus=2", f"roles.{role}.zero_stage=1"]
    if name == "dpo":
        pins += ["roles.reference.engine=deepspeed", "roles.reference.gpus=2"]
    plan = plan_of(name, role, "2x1@cpu", "deepspeed", *pins)
    assert len(plan.roles[role].workers) == 2
    run(plan, tmp_path / "ray", RayRuntime(), [MetricsWriter()])
    run(plan_of(name, role, "local", "torch"), tmp_path / "local", LocalRuntime(), [MetricsWriter()])
    ours, expected = last(tmp_path / "ray"), last(tmp_path / "local")
    assert expected["margin"] != 0
    for figure, value in expected.items():
        assert ours[figure] == pytest.approx(value, rel=1e-3), figure
