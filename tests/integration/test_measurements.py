"""The report of a run has a prediction and a measurement of every node and every process."""

import json
from pathlib import Path

import pytest

import rlflow
from rlflow.commands.calibrate.fit import calibration_of_run
from rlflow.recipe.compose import load_cluster
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import load

pytestmark = pytest.mark.slow


def test_each_node_and_process_is_predicted_and_measured(tmp_path: Path) -> None:
    plan = rlflow.compile(load("recipe=real", "steps=3", "evaluation=null", config_dir=CONFIG_DIR), "local")
    run(plan, tmp_path, LocalRuntime())
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["nodes"]) == {*(node.name for node in plan.graph.nodes), "copy"}
    assert set(report["memory"]["local"]) == {"generate", "score", "update", "sync"}
    pairs = [report["step"], *report["nodes"].values(), *report["memory"]["local"].values()]
    assert all(pair["predicted"] > 0 and pair["measured"] > 0 for pair in pairs)
    # Nodes follow each other in one process, and together they are the step.
    nodes = sum(pair["measured"] for pair in report["nodes"].values())
    assert nodes == pytest.approx(report["step"]["measured"], rel=0.25)
    # This test's process has more libraries than a run, but no second model.
    assert 0.1 < report["memory"]["local"]["update"]["measured"] < 8

    calibration = calibration_of_run(tmp_path, load_cluster("local"))
    assert calibration["cpu/torch"].train_layer_s != calibration["cpu"].train_layer_s
