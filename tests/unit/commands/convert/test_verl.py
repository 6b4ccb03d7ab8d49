"""Scripts of verl become recipes that plan, and no argument gets lost."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import rlflow
from rlflow.cli import run_subcommand
from rlflow.commands.convert.verl import convert
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


# The settings of verl's example of GRPO with Qwen2.5-32B on 2 x 8 GPUs, in the same style: everything in an array, and
# every value in a variable with a default.
ARRAYS = """
#!/usr/bin/env bash
device=${device:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
path=${path:-Qwen/Qwen2.5-32B}
rows=${rows:-$HOME/data/gsm8k/train.parquet} test_rows=${test_rows:-$HOME/data/gsm8k/test.parquet}
hosts=${hosts:-2}
gpus=${gpus:-8}
case "$device" in
    gpu) ;;
    npu) gpus=16 ;;
    *) echo "unknown device $device" >&2; exit 1 ;;
esac
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files=$rows data.val_files=$test_rows
    data.train_batch_size=${prompts:-1024}
    data.max_prompt_length=1024
    data.max_response_length=1024
    data.filter_overlong_prompts=True
)
MODEL=(
    actor_rollout_ref.model.path=${path}
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.rollout.n=5
)
TRAINER=(
    trainer.logger='["console","wandb"]'
    trainer.n_gpus_per_node=${gpus} trainer.nnodes=${hosts} trainer.save_freq=20 trainer.test_freq=5)
MORE=(
)
START=(python3)
if [ "${UV:-1}" != 0 ] && { [ "$device" = gpu ] || [ "$device" = cpu ]; }; then
    START=(uv run python3)
fi
"${START[@]}" -m verl.trainer.main_ppo "${DATA[@]}" \\
    "${MODEL[@]}" \\
    "${TRAINER[@]}" "${MORE[@]}" "$@"
"""
# The settings of DAPO's paper, written as people write scripts: arrays, defaults with quotes in them, sums.
DAPO = """
set -euo pipefail
HOME_OF_DATA=${HOME_OF_DATA:-"/data"}
MODEL=${MODEL:-"${HOME_OF_DATA}/models/Qwen2.5-32B"}
longest=$((1024 * 20)); buffer=$((longest / 5))
GROUPS=(
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc   # two at once
    reward_model.overlong_buffer.enable=True
    reward_model.overlong_buffer.len=$buffer reward_model.overlong_buffer.penalty_factor=1.0)
ray job submit --working-dir . -- python3 -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo \\
    data.train_files="$HOME_OF_DATA/my math.parquet" data.truncation='left' \\
    data.max_response_length=${longest} data.train_batch_size=512 \\
    actor_rollout_ref.model.path="${MODEL}" actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    "${GROUPS[@]}" trainer.total_training_steps=null 2>&1 | tee log.txt  # trainer.nnodes=9
"""
TRAINS = (
    "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=a "
    "actor_rollout_ref.rollout.n=8 "
)
UPDATE = {"node": "policy_update", "role": "actor", "dual_clip": 3.0, "num_minibatches": 4}


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
        **{"source": "/data/gsm8k", "eval_split": "test", "columns": {"answer": "reward_model.ground_truth"}},
        **{"batch_size": 512, "max_prompt_tokens": 1024, "overlong": "truncate_left"},
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
    assert remarks["steps"] == "100 is a guess: write rows of the data / 1024, times 3 epochs"


@pytest.mark.parametrize("prefix", ["", "reward."])
def test_a_remark_names_the_reward_function_of_the_script(prefix: str) -> None:
    remarks = convert(f"{TRAINS} {prefix}custom_reward_function.path=mine.py").remarks
    assert remarks["graph.rewards.function"].startswith("verl calls mine.py:compute_score")
    assert (
        'functions: {compute_score: {function: "mine:compute_score", style: verl}}' in remarks["graph.rewards.function"]
    )


def test_every_argument_has_a_place_or_a_remark() -> None:
    remarks = convert(GRPO).remarks
    assert remarks["some.new_option=1"] == "not known to rlflow"
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size=4"
    assert "roles.rollout.tensor_parallel_size" in remarks[key]
    assert any(remark.startswith("actor_rollout_ref.actor.fsdp_config") for remark in remarks)


@pytest.mark.slow
@pytest.mark.parametrize("script", [GRPO, ARRAYS], ids=["arguments", "arrays"])
def test_the_recipe_of_a_32b_model_is_short_and_plans(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / "run.sh", tmp_path / "run.yaml"
    file.write_text(script)
    assert run_subcommand("convert", [str(file)]) == 0
    assert "cluster=2x8 dry_run=true" in capsys.readouterr().out
    assert len(made.read_text().splitlines()) <= 25
    plan = rlflow.compile(rlflow.load([f"recipe={made}"]), "2x8")
    assert plan.prediction.num_gpus == 16
    assert plan.recipe.roles["actor"].optimizer is not None


def test_dapo_keeps_what_makes_it_dapo() -> None:
    recipe, remarks = content(DAPO), convert(DAPO).remarks
    assert recipe["models"] == {"policy": dict.fromkeys(("path", "architecture_of"), "/data/models/Qwen2.5-32B")}
    assert recipe["defaults"][0] == {"/model@models.policy": "qwen2_5_32b"}
    assert recipe["graph"] == {
        "rollouts": {"node": "generate", "role": "rollout", "group_size": 16, "max_tokens": 20480},
        "old_logprobs": {"node": "logprobs", "role": "actor"},
        "rewards": {"node": "reward", "function": "number"},
        "sampling": {"node": "dynamic_sampling"},
        "shaped": {"node": "overlong_penalty", "max_tokens": 20480, "buffer_tokens": 4096},
        "advantages": {"node": "group_advantage", "epsilon": 1e-6, "rewards": "shaped"},
        "update": {**UPDATE, "clip_eps_high": 0.28, "num_minibatches": 16},
    }
    assert recipe["data"]["source"] == "/data/my math.parquet"
    assert not any("nnodes" in remark for remark in remarks)


@pytest.mark.parametrize("version", ["reward_model.reward_kwargs", "reward.reward_kwargs"])
def test_later_versions_of_verl_name_the_penalty_for_length_otherwise(version: str) -> None:
    named = f"{TRAINS} {version}.overlong_buffer_cfg.enable=True +{version}.overlong_buffer_cfg.len=64"
    graph = content(named)["graph"]
    assert graph["shaped"] == {"node": "overlong_penalty", "max_tokens": 512, "buffer_tokens": 64}
    assert graph["advantages"]["rewards"] == "shaped"


@pytest.mark.parametrize("name", ["grad_clip", "optim.clip_grad"])
def test_both_names_of_the_largest_gradient(name: str) -> None:
    recipe = content(f"{TRAINS} actor_rollout_ref.actor.{name}=0.5")
    assert recipe["roles"]["actor"]["optimizer"]["max_grad_norm"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "update"),
    [
        ("", {}),
        ("actor_rollout_ref.actor.clip_ratio=0.3", {}),
        (
            "actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_low=null "
            "actor_rollout_ref.actor.clip_ratio_high=null",
            {"clip_eps": 0.3},
        ),
        ("actor_rollout_ref.actor.clip_ratio_c=null", {"dual_clip": None}),
        (
            "++actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm data.max_response_length=3072",
            {"aggregation": "constant", "constant_length": 3072},
        ),
        (
            "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_type=mse",
            {"kl_coef": 0.001, "kl_estimator": "k2"},
        ),
        (
            "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=5.0",
            {"correction": {"level": "sequence", "max_ratio": 5.0}},
        ),
    ],
)
def test_the_loss_is_that_of_verl(arguments: str, update: dict[str, Any]) -> None:
    """Null turns a bound off; clip_ratio counts only without the bounds of the two sides, which have defaults."""
    assert content(TRAINS + arguments)["graph"]["update"] == UPDATE | update


def test_gspo_has_its_own_loss() -> None:
    actor = "actor_rollout_ref.actor"
    script = f"{TRAINS} {actor}.policy_loss.loss_mode=gspo {actor}.clip_ratio_low=3e-4 {actor}.clip_ratio_high=4e-4"
    assert content(script)["graph"]["update"] == {
        **{"node": "gspo_update", "role": "actor", "clip_eps": 3e-4, "clip_eps_high": 4e-4, "aggregation": "token"},
        "num_minibatches": 4,
    }


def test_a_penalty_for_kl_is_in_the_reward_of_a_group() -> None:
    graph = content(f"{TRAINS} algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl")["graph"]
    assert graph["kl"] == {"node": "kl_divergence", "kl_estimator": "k3"}
    assert graph["penalized"] == {"node": "kl_penalty", "kl_coef": 0.001}
    assert graph["advantages"]["rewards"] == "penalized"


IN_REWARD = "algorithm.use_kl_in_reward=True actor_rollout_ref.rollout.n=4"
IN_LOSS = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.n=4"
PENALIZED = {"kl": {"node": "kl_divergence"}, "penalized": {"node": "kl_penalty", "kl_coef": 0.001}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "arguments", "nodes"),
    [
        (
            "rloo",
            IN_REWARD,
            PENALIZED | {"advantages": {"node": "leave_one_out_advantage", "rewards": "penalized"}},
        ),
        (
            "remax",
            "data.max_response_length=96",
            {
                "greedy": {
                    **{"node": "generate", "role": "rollout", "group_size": 1, "temperature": 0, "max_tokens": 96}
                },
                "greedy_rewards": {"node": "reward", "rollouts": "greedy", "function": "${graph.rewards.function}"},
                "advantages": {"node": "greedy_advantage"},
            },
        ),
        ("reinforce_plus_plus", "", {"advantages": {"node": "token_advantage", "unbiased": True}}),
        (
            "reinforce_plus_plus",
            f"{IN_REWARD} algorithm.kl_penalty=k3",
            {"advantages": {"node": "token_advantage", "unbiased": True, "kl_coef": 0.001, "kl_estimator": "k3"}},
        ),
        ("reinforce_plus_plus_baseline", IN_LOSS, {"advantages": {"node": "batch_advantage", "unbiased": True}}),
    ],
)
def test_other_estimators_of_advantages(estimator: str, arguments: str, nodes: dict[str, Any], tmp_path: Path) -> None:
    script = TRAINS.replace("=grpo", f"={estimator}").replace("path=a", "path=Qwen/Qwen2.5-7B") + arguments
    graph = content(script)["graph"]
    others = {"rollouts", "old_logprobs", "rewards", "reference", "update"}
    assert {name: node for name, node in graph.items() if name not in others} == nodes
    assert graph["update"]["node"] == "policy_update"
    file = tmp_path / "run.yaml"
    file.write_text(convert(script).recipe)
    plan = rlflow.compile(rlflow.load([f"recipe={file}"]), "1x8")
    assert {node.name for node in plan.graph.nodes} >= set(graph)


def test_a_critic_has_its_own_model_optimizer_and_minibatches() -> None:
    recipe = content(
        f"{PPO.strip()} critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.ppo_mini_batch_size=512 "
        "critic.ppo_epochs=1 critic.optim.lr_warmup_steps_ratio=0.1 critic.grad_clip=0.5 "
        "trainer.total_training_steps=200"
    )
    assert recipe["defaults"][0] == {"/model@models.critic": "qwen2_5_0_5b"}
    assert recipe["roles"]["critic"] == {
        "model": "critic",
        "engine": "deepspeed",
        "optimizer": {"learning_rate": 2e-5, "warmup_steps": 20, "weight_decay": 0.01, "max_grad_norm": 0.5},
    }
    assert recipe["graph"]["value_update"]["num_minibatches"] == 2
    assert recipe["roles"]["actor"]["optimizer"] == {"learning_rate": 1e-6, "weight_decay": 0.01}


@pytest.mark.parametrize(
    ("arguments", "remark", "why"),
    [
        ("$@", "$@", "is only known when the script runs"),
        ("\"${MORE[@]}\"", "${MORE[@]}", "is only known when the script runs"),
        ("--config-name=mine", "--config-name=mine", "give the values of a configuration of your own"),
        ("model_engine=megatron", "model_engine=megatron", "chooses a part of verl's configuration"),
        ("~trainer.logger", "~trainer.logger", "removes a part of verl's configuration"),
        ("trainer.test_freq=5", "trainer.test_freq=5", "nothing is evaluated"),
        ("data.train_files=[/a,/b]", "data.train_files=['/a', '/b']", "only /a is in the recipe"),
        ("data.train_batch_size=100 actor_rollout_ref.actor.ppo_mini_batch_size=48",
         "actor_rollout_ref.actor.ppo_mini_batch_size=48", "2 minibatches of about equally many of 100 prompts"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=wsd",
         "actor_rollout_ref.actor.optim.lr_scheduler_type=wsd", "the learning rate is constant"),
        ("trainer.experiment_name=x-$(date +%F)", "trainer.experiment_name=x-$(date +%F)", "a run is known"),
    ],
)  # fmt: skip
def test_a_remark_says_what_is_not_in_the_recipe(arguments: str, remark: str, why: str) -> None:
    assert why in convert(TRAINS + arguments).remarks[remark]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("algorithm.adv_estimator=opo actor_rollout_ref.model.path=a", "'opo' is not converted"),
        (TRAINS + "trainer.total_training_steps=0", "expected a whole number from 1, got '0'"),
        (TRAINS + "actor_rollout_ref.actor.use_kl_loss=1", "expected True or False, got '1'"),
        (TRAINS + "actor_rollout_ref.actor.optim.lr=1e999", "expected a number, got 'inf'"),
        (TRAINS + "actor_rollout_ref.actor.loss_agg_mode=[a]", "expected a text"),
        ("echo nothing", "actor_rollout_ref.model.path: is missing"),
        (f"{TRAINS}\n{TRAINS}", "has 2 commands that train"),
        (f"{TRAINS} actor_rollout_ref.actor.policy_loss.loss_mode=gpg", "'gpg' is not converted"),
        (TRAINS + "reward_model.overlong_buffer.enable=True", "overlong_buffer.len: is missing"),
        (TRAINS + "x" * 300_000, "has more than 256 KiB"),
        ("a=$b$b\nb=$a$a\n" * 100 + "a=xx\n" + "a=$a$a$a$a$a$a$a$a\n" * 60 + TRAINS, "has more than 256 KiB"),
        (TRAINS + "$(" * 3_000, "is nested too deeply|is missing"),
        (TRAINS + "\x1b[2J", "has control characters"),
    ],
)
def test_what_cannot_be_converted(
    script: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecipeError, match=message):
        convert(script)
    (tmp_path / "run.sh").write_text(script)
    assert run_subcommand("convert", [str(tmp_path / "run.sh")]) == 2
    assert capsys.readouterr().err.startswith("RecipeError: ")
    assert not (tmp_path / "run.yaml").exists()


def test_files_that_cannot_be_read_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latin, script, there = tmp_path / "latin.sh", tmp_path / "run.sh", tmp_path / "run.yaml"
    latin.write_bytes(b"\xe9")
    script.write_text(TRAINS)
    there.write_text("mine")
    for arguments, message in (
        ([tmp_path / "nowhere.sh"], f"{tmp_path}/nowhere.sh: No such file or directory."),
        ([tmp_path], f"{tmp_path}: Is a directory."),
        ([latin], f"{latin}: is not UTF-8."),
        ([script], f"{there}: exists already.\n  Fix: --output FILE, which may replace it."),
        ([script, "--output", tmp_path / "no" / "x.yaml"], f"{tmp_path}/no/x.yaml: No such file or directory."),
    ):
        assert run_subcommand("convert", [str(argument) for argument in arguments]) == 2
        assert capsys.readouterr().err == f"FileError: {message}\n"
    assert there.read_text() == "mine"
