"""Every tiny recipe with a model so small that it takes no time: two steps, before and after which it is evaluated."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rlflow
from rlflow.recipe.evaluation import Evaluation
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR, ROOT
from tests.glossary import unexplained
from tests.helpers import load

# SFT has no evaluation, and RLHF needs a trained reward model.
ALGORITHMS = sorted({path.stem for path in (ROOT / "conf" / "algorithm").glob("*.yaml")} - {"sft", "rlhf"})
FROM_PAIRS = {"dpo", "kto", "rm"}
# The metrics of each algorithm, besides those of all.
SAID = {
    "cispo": ["update/clip_fraction"],
    "dapo": ["shaped/mean", "sampling/differing"],
    "distill": ["rewards/mean", "update/clip_fraction", "update/kl"],
    "distill_top": ["rewards/mean", "update/covered", "update/scored"],
    "dpo": ["update/accuracy", "update/margin"],
    "dr_grpo": ["update/clip_fraction"],
    "grpo": ["update/clip_fraction", "update/kl"],
    "grpo_lora": ["update/clip_fraction", "update/kl"],
    "gspo": ["update/clip_fraction"],
    "kto": ["update/accuracy", "update/point"],
    "online_dpo": ["rewards/mean", "update/accuracy"],
    "ppo": ["update/clip_fraction", "value_update/loss", "advantages/explained_variance", "advantages/kl"],
    "reinforce_plus_plus": ["update/clip_fraction"],
    "reinforce_plus_plus_baseline": ["update/clip_fraction", "update/kl"],
    "remax": ["greedy/length_mean", "greedy_rewards/mean"],
    "rloo": ["kl/mean", "penalized/mean"],
    "rm": ["update/accuracy", "update/margin"],
    "rm_own": ["rewards/mean", "update/accuracy"],
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_runs(algorithm: str, tmp_path: Path) -> None:
    reward = [] if algorithm in FROM_PAIRS else ["graph.rewards.function='tests.integration.reward_functions:length'"]
    roles = {"ppo": ("actor", "critic"), "rm": ("reward",), "rm_own": ("reward",)}.get(algorithm, ("actor",))
    no_warmup = [f"roles.{role}.optimizer.warmup_steps=0" for role in roles]
    recipe = load(f"recipe={algorithm}_tiny", "steps=2", "data.batch_size=4", *no_warmup, *reward)
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
    assert unexplained(steps) == set()


@pytest.mark.slow
def test_metrics_of_options_are_explained(tmp_path: Path) -> None:
    """Limits that cut some responses and environments aside, each option that adds a metric."""
    options = (
        "steps=2",
        "evaluation={every: 2, num_prompts: 4, num_responses: 2, temperature: 1.0}",
        "+graph.old_logprobs={node: logprobs, role: actor}",
        "+graph.update.correction={level: token, outside: mask}",
        "graph.update.kl_coef=0.01",
        "+graph.update.kl_target=0.1",
        "+graph.update.num_minibatches=3",
        "+graph.update.skip_truncated=true",
        "graph.rollouts.max_tokens=1",
    )
    plan = rlflow.compile(load("recipe=real", *options, config_dir=CONFIG_DIR), "local")
    run(plan, tmp_path, LocalRuntime(), [MetricsWriter()])
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = {name for step in steps for name in step}
    assert names >= {"update/corrected_fraction", "update/kl_coef", "update/skipped", "evaluation/pass_at_2"}
    assert unexplained(steps) == set()
