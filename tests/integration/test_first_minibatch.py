"""The first minibatch of a step takes its old logprobs from the update's own forward pass, and nothing else changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlflow
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.loading import load_rows
from rlflow.data.source import open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.step import train_step
from rlflow.runtime.training import Training
from tests.conftest import CONFIG_DIR
from tests.helpers import load

pytestmark = pytest.mark.slow

NODE = "++graph.old_logprobs={node: logprobs, role: actor}"
TIS = "++graph.update.correction={level: token, outside: bound, max_ratio: 1.01}"
ICEPOP = "++graph.update.correction={level: token, outside: mask, min_ratio: 0.99, max_ratio: 1.01}"
GEOMETRIC = "++graph.update.correction={level: geometric, outside: mask, min_ratio: 0.99, max_ratio: 1.01}"
# The sampler is up to two versions older than the policy that trains.
OVERLAP = "overlap.max_staleness=2"
CASES = [
    ("grpo", "graph.update.kl_coef=0.1"),
    ("grpo_lora", "graph.update.kl_coef=0.1"),
    ("grpo", OVERLAP, TIS, "++graph.update.kl_target=0.1", "graph.update.kl_coef=0.1"),
    ("grpo_lora", OVERLAP, ICEPOP),
    ("gspo", OVERLAP, GEOMETRIC),
    ("cispo", OVERLAP, TIS, "++graph.update.skip_truncated=true"),
    ("dapo", "data.batch_size=2"),
    ("dr_grpo", "++graph.update.entropy_coef=0.01"),
    ("remax",),
    ("reinforce_plus_plus_baseline",),
]


def plan_of(algorithm: str, *overrides: str) -> Plan:
    fixed = (
        "graph.rewards.function='tests.integration.reward_functions:sum_of_characters'",
        "data.batch_size=4",
        "roles.actor.optimizer={learning_rate: 0.1, schedule: constant, warmup_steps: 0}",
        NODE,
    )
    recipe = load(f"recipe={algorithm}_tiny", *fixed, *overrides)
    small = load("recipe=real", config_dir=CONFIG_DIR).models["policy"]
    return rlflow.compile(replace(recipe, models=dict.fromkeys(recipe.models, small), evaluation=None), "local")


def train(plan: Plan, folder: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Return the metrics of three steps, and the weights after them: their difference is the sum of the gradients."""
    models = models_in_use(plan.recipe)
    data = open_training_data(
        plan.recipe.data, load_tokenizer("policy", models["policy"]), load_rows(plan.recipe.data, "split"), 0
    )
    with LocalRuntime().start(plan, models, folder) as engines:
        actor = engines["actor"]
        # Adam would enlarge rounding errors of small gradients.
        actor._optimizer = torch.optim.SGD(actor._trained_weights().values())
        training = Training.of(plan, engines, data)
        steps = [train_step(training, step) for step in range(3)]
        if training.start_of_step is not None:
            training.start_of_step.close()
        weights = {name: weight.clone().numpy() for name, weight in actor.weights()}
    is_time = ("seconds", "per_second", "mfu", "memory")
    return [{k: v for k, v in step.items() if not any(word in k for word in is_time)} for step in steps], weights


# With one minibatch the node has no work left. What differs is shared by all algorithms: most have one of both numbers.
@pytest.mark.parametrize(
    ("case", "num_minibatches"),
    [*((case, 1 + 2 * (place % 2)) for place, case in enumerate(CASES)), (CASES[0], 3), (CASES[1], 1)],
    ids=lambda case: "-".join(part.split("=")[0].split(".")[-1] for part in case) if isinstance(case, tuple) else None,
)
def test_weights_and_metrics_are_those_of_a_separate_pass(
    case: tuple[str, ...], num_minibatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*case, f"++graph.update.num_minibatches={num_minibatches}")
    expected, expected_weights = train(plan_of(*options, "++graph.update.score_first_minibatch=true"), tmp_path)
    plan = plan_of(*options)
    tasks = {task.node: task for task in plan.workload.tasks}
    assert ("old_logprobs" in tasks) == (num_minibatches > 1)
    metrics, weights = train(plan, tmp_path)
    for step, expected_step in zip(metrics, expected, strict=True):
        assert step == pytest.approx(expected_step, rel=1e-5, abs=1e-6)
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, expected_weights[name], rtol=0, atol=1e-6, err_msg=name)
