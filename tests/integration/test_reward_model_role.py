"""A reward model as a role of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import rlflow
from rlflow.engines.torch import TorchEngine
from rlflow.recipe import Model
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import load, spec


@pytest.mark.slow
@pytest.mark.parametrize("judged_by_sums", [True, False])
def test_its_rewards_are_those_of_the_steps(judged_by_sums: bool, tmp_path: Path) -> None:
    """A function judges held-out responses if the graph has one, and otherwise the model does."""
    TorchEngine(spec(capabilities=["Trains", "Evaluates"])).export(tmp_path / "judge")
    without = [] if judged_by_sums else ["~graph.exact"]
    recipe = load("recipe=reward_model", *without, config_dir=CONFIG_DIR)
    models = {
        "policy": load("recipe=real", config_dir=CONFIG_DIR).models["policy"],
        "judge": Model(path=str(tmp_path / "judge"), dtype="float32"),
    }
    report = run(
        rlflow.compile(replace(recipe, models=models), "local"), tmp_path / "run", LocalRuntime(), [MetricsWriter()]
    )
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["rewards/mean"] for step in steps if "rewards/mean" in step]
    assert len(rewards) == 2
    # A head that was drawn says something other than nought to any sum.
    assert all(0 < abs(reward) < 10 for reward in rewards)
    assert report.eval_after is not None
    assert (report.eval_after == 0) == judged_by_sums
