"""Scripts of verl become recipes that plan, and no argument gets lost."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import rlflow
from rlflow.convert.__main__ import main
from rlflow.convert.shell import read_arguments
from rlflow.convert.verl import convert
from rlflow.errors import RecipeError

GRPO = """
# data.train_batch_size=7 is a comment
export BASE=/data/gsm8k
model=Qwen/Qwen2.5-32B-Instruct
longest=$((1024 * 4))
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="${BASE}/train.parquet" data.val_files=${BASE}/test.parquet \\
    data.train_batch_size=512 data.max_prompt_length=$((512 * 2)) data.max_response_length=${longest} \\
    data.truncation='left' \\
    actor_rollout_ref.model.path=$model \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.n=${group:-5} actor_rollout_ref.rollout.temperature=0.7 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    some.new_option=1 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.test_freq=5 trainer.total_training_steps=300 $@
"""
PPO = """
python -m verl.trainer.main_ppo data.train_files=train.parquet actor_rollout_ref.model.path=my/own-7b \\
    actor_rollout_ref.actor.ppo_epochs=2 critic.optim.lr=2e-5 trainer.critic_warmup=4 \\
    algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.002 trainer.total_epochs=3
"""


def content(script: str) -> Any:
    return yaml.safe_load(convert(script).recipe)


def test_variables_defaults_and_products_of_the_shell_are_filled_in() -> None:
    arguments = read_arguments(GRPO)
    assert arguments["data.train_files"] == "/data/gsm8k/train.parquet"
    assert arguments["data.max_prompt_length"] == 1024
    assert arguments["data.max_response_length"] == 4096
    assert arguments["actor_rollout_ref.rollout.n"] == 5
    assert arguments["actor_rollout_ref.actor.optim.lr"] == 3e-6
    assert arguments["data.train_batch_size"] == 512
    assert arguments["actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"] == "bf16"


def test_a_variable_with_its_own_default_has_that_default() -> None:
    assert read_arguments('N=${N:-2}\nrun trainer.nnodes="${N}"') == {"trainer.nnodes": 2}


def test_grpo_has_the_numbers_of_the_script_and_the_defaults_of_verl() -> None:
    recipe = content(GRPO)
    assert recipe["defaults"][0] == {"/model@models.policy": "qwen2_5_32b"}
    assert recipe["steps"] == 300
    assert recipe["roles"]["actor"]["optimizer"] == {"learning_rate": 3e-6, "weight_decay": 0.01}
    assert recipe["graph"]["rollouts"] == {
        **{"node": "generate", "role": "rollout", "group_size": 5, "max_tokens": 4096, "temperature": 0.7}
    }
    assert recipe["graph"]["update"] == {
        **{"node": "policy_update", "role": "actor", "dual_clip": 3.0, "clip_eps_high": 0.28, "kl_coef": 0.01},
        "num_minibatches": 4,
    }
    assert recipe["graph"]["advantages"] == {"node": "group_advantage", "epsilon": 1e-6}
    assert recipe["data"] == {
        **{"source": "/data/gsm8k", "eval_split": "test", "batch_size": 512, "max_prompt_tokens": 1024},
        "overlong": "truncate_left",
    }
    assert recipe["evaluation"]["every"] == 5


def test_ppo_has_a_critic_and_its_penalty_in_the_reward() -> None:
    recipe, remarks = content(PPO), convert(PPO).remarks
    assert recipe["models"] == {"policy": {"path": "my/own-7b"}}
    assert recipe["roles"]["critic"]["optimizer"]["learning_rate"] == 2e-5
    assert recipe["graph"]["advantages"] == {
        **{"node": "gae_advantage", "gamma": 1.0, "lam": 1.0, "kl_coef": 0.002, "unbiased": True}
    }
    update, value_update = recipe["graph"]["update"], recipe["graph"]["value_update"]
    assert (update["num_minibatches"], update["num_epochs"], update["critic_warmup"]) == (4, 2, 4)
    assert (value_update["clip_eps"], value_update["num_minibatches"], value_update["num_epochs"]) == (0.5, 4, 2)
    assert remarks["steps"] == "rows of the data / 1024, times 3 epochs"


@pytest.mark.parametrize("prefix", ["", "reward."])
def test_a_remark_names_the_reward_function_of_the_script(prefix: str) -> None:
    remarks = convert(f"{GRPO} {prefix}custom_reward_function.path=mine.py").remarks
    assert remarks["graph.rewards.function"].startswith("verl calls mine.py:compute_score")


def test_every_argument_has_a_place_or_a_remark() -> None:
    remarks = convert(GRPO).remarks
    assert remarks["some.new_option=1"] == "not known to rlflow"
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size=4"
    assert "roles.rollout.tensor_parallel_size" in remarks[key]
    assert any(remark.startswith("actor_rollout_ref.actor.fsdp_config") for remark in remarks)


def test_the_recipe_of_a_32b_model_is_short_and_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(GRPO)
    assert main([str(script)]) == 0
    assert "cluster=2x8 dry_run=true" in capsys.readouterr().out
    file = tmp_path / "run.yaml"
    assert len(file.read_text().splitlines()) <= 25
    plan = rlflow.compile(rlflow.load([f"recipe={file}"]), "2x8")
    assert plan.prediction.num_gpus == 16
    assert plan.recipe.roles["actor"].optimizer is not None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("algorithm.adv_estimator=opo actor_rollout_ref.model.path=a", "'opo' is not converted"),
        ("actor_rollout_ref.model.path=a trainer.nnodes=$N", "trainer.nnodes: expected a number"),
        ("echo nothing", "actor_rollout_ref.model.path: is missing"),
    ],
)
def test_what_cannot_be_converted(
    script: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecipeError, match=message):
        convert(script)
    (tmp_path / "run.sh").write_text(script)
    assert main([str(tmp_path / "run.sh")]) == 2
    assert main([str(tmp_path / "nowhere.sh")]) == 2
    assert "does not exist" in capsys.readouterr().err
