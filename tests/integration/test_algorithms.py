"""Every tiny recipe with a model so small that it takes no time: two steps, before and after which it is evaluated."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rlflow
from rlflow.evaluation import Evaluation
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR, ROOT
from tests.helpers import load

ALGORITHMS = sorted({path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml")} - {"sft"})
FROM_PAIRS = {"dpo", "rm"}
# The metrics of each algorithm, besides those of all.
SAID = {
    "cispo": ["update/clip_fraction"],
    "dapo": ["shaped/mean", "sampling/differing"],
    "distill": ["rewards/mean", "update/clip_fraction", "update/kl"],
    "dpo": ["update/accuracy", "update/margin"],
    "dr_grpo": ["update/clip_fraction"],
    "grpo": ["update/clip_fraction", "update/kl"],
    "grpo_lora": ["update/clip_fraction", "update/kl"],
    "gspo": ["update/clip_fraction"],
    "ppo": ["update/clip_fraction", "value_update/loss", "advantages/explained_variance", "advantages/kl"],
    "reinforce_plus_plus": ["update/clip_fraction"],
    "reinforce_plus_plus_baseline": ["update/clip_fraction", "update/kl"],
    "remax": ["greedy/length_mean", "greedy_rewards/mean"],
    "rloo": ["kl/mean", "penalized/mean"],
    "rm": ["update/accuracy", "update/margin"],
}
# The last part of each name in the documentation of metrics, with those that are written as the end of another name.
EXPLAINED = {
    name.split("/")[-1] for name in re.findall(r"`([\w/]+)`", (ROOT / "docs" / "metrics.md").read_text()) if name
} | {"step", "clip_fraction_positive", "clip_fraction_negative"}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_runs(algorithm: str, tmp_path: Path) -> None:
    reward = [] if algorithm in FROM_PAIRS else ["graph.rewards.function='tests.integration.reward_functions:length'"]
    recipe = load(f"recipe={algorithm}_tiny", "steps=2", "data.batch_size=4", *reward)
    small = load("recipe=real", config_dir=CONFIG_DIR).models["policy"]
    recipe = replace(recipe, models=dict.fromkeys(recipe.models, small), evaluation=Evaluation(every=2, num_prompts=5))
    report = run(rlflow.compile(recipe, "local"), tmp_path, LocalRuntime(), [MetricsWriter()])
    assert report.status == "finished"
    assert report.eval_after is not None
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "update/loss" in step]
    assert len(trained) == 2
    for step in trained:
        assert all(np.isfinite(step[name]) for name in ["update/loss", "update/grad_norm", *SAID[algorithm]])
    assert {name.split("/")[-1] for step in steps for name in step if not name.startswith("seconds/")} <= EXPLAINED
