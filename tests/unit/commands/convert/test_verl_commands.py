"""Commands and values of scripts as people post them: trainers, configurations, counts of the environment, null."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import rlflow
from rlflow.commands.convert.verl import convert
from rlflow.errors import RecipeError

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
DATA = f"data.train_files=d/train.parquet {MODEL}.path=Qwen/Qwen2.5-7B-Instruct"
GRPO = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {DATA} {ROLLOUT}.n=8 "


def content(script: str) -> Any:
    return yaml.safe_load(convert(script).recipe)


@pytest.mark.parametrize(
    "trainer",
    [
        *("-m recipe.spin.main_spin", "-m recipe.prime.main_prime", "-m verl.mix_src.main_mix_ppo"),
        *("recipe/gkd/main_gkd.py", "-m verl.trainer.main", "-m verl.trainer.fsdp_sft_trainer", "train.py"),
        *("-m recipe.fully_async_policy.fully_async_main", "-m verl.experimental.fully_async_policy.main_ppo"),
    ],
)
def test_trainers_with_another_algorithm_are_refused_by_name(trainer: str) -> None:
    with pytest.raises(RecipeError, match=f"'{trainer.removeprefix('-m ')}' is a trainer of its own"):
        convert(f"torchrun --nproc_per_node=8 python3 {trainer} {DATA}")


@pytest.mark.parametrize("trainer", ["-m my.package.train_agent", "src/train_rl.py", "-m recipe.own.main_ppo"])
def test_a_trainer_of_the_project_that_states_its_algorithm_is_named(trainer: str) -> None:
    remarks = convert(GRPO.replace("-m verl.trainer.main_ppo", trainer)).remarks
    assert "read as" in remarks[trainer.removeprefix("-m ")]


@pytest.mark.parametrize("config", ["--config-name=mine", "--config-path=conf --config-name mine", "-cn mine"])
def test_the_algorithm_of_a_configuration_that_is_not_read_is_not_guessed(config: str) -> None:
    with pytest.raises(RecipeError, match="the script's own configuration 'mine' is not read"):
        convert(f"python -m verl.trainer.main_ppo {config} {DATA}")
    assert content(f"python -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' {DATA}")["roles"][
        "critic"
    ]


@pytest.mark.parametrize(
    ("trainer_hosts", "gpus", "rollout_hosts", "rollout_gpus", "cluster"),
    [(2, 6, 2, 2, "2x8"), (1, 4, 1, 4, "1x8"), (2, 8, 1, 8, "3x8"), (1, 8, 1, 8, "2x8"), (2, 8, 1, 4, "3x8")],
)
def test_one_step_off_generates_ahead_on_gpus_of_its_own(
    trainer_hosts: int, gpus: int, rollout_hosts: int, rollout_gpus: int, cluster: str
) -> None:
    numbers = f"trainer.nnodes={trainer_hosts} trainer.n_gpus_per_node={gpus} rollout.nnodes={rollout_hosts}"
    script = f"{GRPO} {numbers} rollout.n_gpus_per_node={rollout_gpus}"
    converted = convert(script.replace("verl.trainer.main_ppo", "recipe.one_step_off_policy.async_main_ppo"))
    recipe = yaml.safe_load(converted.recipe)
    assert converted.cluster == cluster
    assert recipe["overlap"] == {"max_staleness": 1}
    assert recipe["roles"]["rollout"]["colocate"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            "algorithm.kl_ctrl.kl_coef=null",
            f"{ACTOR}.kl_loss_coef=null",
            "critic.ppo_epochs=null",
            "trainer.save_freq=null",
        ),
        *("trainer.test_freq=null", "data.val_files=null", f"{ROLLOUT}.val_kwargs.n=null", "algorithm.gamma=null"),
    ],
)
def test_null_is_no_error_where_verl_does_not_read_it(arguments: str) -> None:
    assert content(GRPO + arguments)["steps"] == 100


@pytest.mark.parametrize("arguments", ["trainer.val_only=True", "+trainer.val_only=true", "distillation.enabled=True"])
def test_scripts_that_do_something_else_are_refused(arguments: str) -> None:
    with pytest.raises(RecipeError, match="is True: the"):
        convert(GRPO + arguments)


@pytest.mark.parametrize(
    ("arguments", "cluster"),
    [
        ("trainer.n_gpus_per_node=$N_GPUS trainer.nnodes=2", "2x8"),
        ("trainer.n_gpus_per_node=4 trainer.nnodes=$SLURM_NNODES", "1x4"),
        ("trainer.n_gpus_per_node=${N_GPUS:-4} trainer.nnodes=${WORLD:=3}", "3x4"),
        ("trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l)", "1x8"),
    ],
)
def test_counts_of_the_environment_are_named(arguments: str, cluster: str) -> None:
    converted = convert(GRPO + arguments)
    assert converted.cluster == cluster
    unknown = [remark for remark in converted.remarks.values() if "is only known when the script runs" in remark]
    assert len(unknown) == (":-" not in arguments)


@pytest.mark.parametrize(
    "argument",
    [
        *("data.train_files=${DIR%/}/a.parquet", "data.train_files=${1:?name a file}", "data.train_files=${X[0]}/a"),
        *(
            f"{MODEL}.path=${{BASH_SOURCE[0]}}/x",
            "data.train_files=$(dirname ${X})/a",
            "data.train_files='${oc.env:X}/a'",
        ),
        *("data.prompt_key='a: {b'", "data.train_files='a\\${b}'", "data.train_batch_size=$((N * 2))"),
    ],
)
def test_what_is_written_can_be_loaded(argument: str, tmp_path: Path) -> None:
    """Values that only the shell knows are texts in the recipe, and refer to nothing."""
    file = tmp_path / "run.yaml"
    file.write_text(convert(GRPO + argument).recipe)
    assert rlflow.load([f"recipe={file}"]).steps == 100


def test_a_value_of_verls_configuration_may_name_another_one() -> None:
    script = f"{GRPO} {ACTOR}.ppo_mini_batch_size='${{data.train_batch_size}}' data.train_batch_size=64"
    assert "num_minibatches" not in content(script)["graph"]["update"]


@pytest.mark.parametrize(
    "rest", [f"# {MODEL}.lora_rank=8 \\\n trainer.total_epochs=2 max_turns=4", "\n trainer.total_epochs=2 max_turns=4"]
)
def test_arguments_after_a_comment_do_not_reach_the_command(rest: str) -> None:
    remarks = convert(f"{GRPO} \\\n{rest}").remarks
    assert remarks["max_turns=4"].startswith("is not among the arguments of the command")


def test_scripts_of_old_versions_say_which_defaults_differ() -> None:
    remark = convert(f"{GRPO} {ACTOR}.ppo_micro_batch_size=8").remarks["the version of verl"]
    assert "entropy_coeff of 0.001, no dual clip, use_kl_in_reward=True" in remark
    assert "the version of verl" not in convert(f"{GRPO} {ACTOR}.ppo_micro_batch_size_per_gpu=8").remarks
