"""Kinds of scripts as people post them: each is converted as it is meant, or refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import rlflow
from rlflow.cli import run_subcommand
from rlflow.commands.convert.verl import convert
from rlflow.commands.convert.verl_remarks import reason_without_place
from rlflow.errors import RecipeError

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
DATA = f"data.train_files=d/train.parquet {MODEL}.path=Qwen/Qwen2.5-7B-Instruct"
GRPO = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {DATA} {ROLLOUT}.n=8 "
CORRECTION = "algorithm.rollout_correction"
KL = f"{ACTOR}.use_kl_loss=True"
ROLES = ("actor", "critic", "reference", "reward", "rollout")


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
        f"{MODEL}.lora_rank=32 {KL}",
        f"{MODEL}.lora_rank=8 algorithm.use_kl_in_reward=True",
        f"{MODEL}.lora.rank=16 {KL}",
        f"{MODEL}.lora_rank=8 {KL} algorithm.adv_estimator=reinforce_plus_plus",
    ],
)
def test_the_reference_of_adapters_is_the_actor_without_them(arguments: str) -> None:
    recipe = content(GRPO + arguments)
    assert recipe["graph"]["reference"] == {"node": "base_logprobs", "role": "actor"}
    assert "reference" not in recipe["roles"]
    assert "reference" in content(GRPO + KL)["roles"]


def test_adapters_have_the_names_of_both_engines() -> None:
    fsdp = f"{MODEL}.lora_rank=64 {MODEL}.lora_alpha=128 {MODEL}.target_modules=[q_proj,v_proj]"
    lora = {"rank": 64, "alpha": 128.0, "target_modules": ["q_proj", "v_proj"]}
    assert content(GRPO + fsdp)["roles"]["actor"]["lora"] == lora
    assert content(f"{GRPO} {MODEL}.lora.rank=64")["roles"]["actor"]["lora"] == {"rank": 64, "alpha": 32.0}


@pytest.mark.parametrize("key", ["lora_adapter_path", "lora.adapter_path"])
def test_an_adapter_to_go_on_with_is_not_full_training(key: str) -> None:
    script = f"{GRPO} {MODEL}.{key}=saved/adapter"
    with pytest.raises(RecipeError, match="rlflow starts adapters anew"):
        convert(script)
    remarks = convert(f"{script} {MODEL}.lora_rank=8").remarks
    assert "merge it into the model" in remarks[f"{MODEL}.{key}=saved/adapter"]
    assert "lora" not in content(f"{GRPO} {MODEL}.{key}=null")["roles"]["actor"]


@pytest.mark.parametrize(
    ("estimator", "arguments"),
    [
        *(("grpo", ""), ("rloo", f"{ROLLOUT}.n=1"), ("reinforce_plus_plus_baseline", ""), ("rloo_vectorized", "")),
        ("gae", "algorithm.filter_groups.enable=True"),
    ],
)
def test_a_group_of_one_has_nothing_to_compare(estimator: str, arguments: str) -> None:
    script = f"python -m verl.trainer.main_ppo algorithm.adv_estimator={estimator} {DATA} {arguments} "
    with pytest.raises(RecipeError, match=r"actor_rollout_ref.rollout.n: is 1, and .* compares"):
        convert(script)
    assert content(f"{script} {ROLLOUT}.n=4")["graph"]["rollouts"]["group_size"] == 4


@pytest.mark.parametrize(
    ("arguments", "size"), [(f"{ROLLOUT}.n_agent=5", 5), (f"{ROLLOUT}.n_agent=2 {ROLLOUT}.n=3", 6)]
)
def test_n_agent_is_the_size_of_a_group(arguments: str, size: int) -> None:
    script = f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {DATA} {arguments}"
    assert content(script)["graph"]["rollouts"]["group_size"] == size
    turns = convert(f"{script} max_turns=2 do_search=true retriever.topk=3 env.name=x agent.name=y").remarks
    for word in ("max_turns=2", "do_search=True", "retriever.topk=3", "env.name=x", "agent.name=y"):
        assert "converse" in turns[word]


@pytest.mark.parametrize(
    ("arguments", "correction"),
    [
        (f"{CORRECTION}.rollout_is=null {CORRECTION}.rollout_is_threshold=null", None),
        (f"{CORRECTION}.rollout_is_threshold=null", None),
        (f"{ACTOR}.tis_imp_ratio_cap=-1", None),
        (f"{ACTOR}.tis_imp_ratio_cap=2.0", {"level": "token", "max_ratio": 2.0}),
        (f"{CORRECTION}.rollout_is=sequence", {"level": "sequence", "max_ratio": 2.0}),
        (
            f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold='0.5_5.0'",
            {"level": "token", "outside": "mask", "min_ratio": 0.5, "max_ratio": 5.0},
        ),
    ],
)
def test_thresholds_of_a_correction(arguments: str, correction: dict[str, Any] | None) -> None:
    """A threshold counts only with a level of the weights."""
    assert content(GRPO + arguments)["graph"]["update"].get("correction") == correction


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


def test_without_old_logprobs_the_sampler_is_the_old_policy() -> None:
    assert "old_logprobs" not in content(f"{GRPO} {CORRECTION}.bypass_mode=True")["graph"]


@pytest.mark.parametrize(
    ("key", "model", "card"),
    [
        ("max_position_embeddings", "Qwen/Qwen2.5-Math-7B", "qwen2_5_math_7b"),
        ("model_config.max_position_embeddings", "Qwen/Qwen2.5-Math-1.5B", "qwen2_5_math_1_5b"),
        ("max_position_embeddings", "my/Qwen2.5-Math-7B-Instruct", "qwen2_5_math_7b"),
    ],
)
def test_positions_of_the_script_are_those_of_the_plan(key: str, model: str, card: str, tmp_path: Path) -> None:
    argument = f"{MODEL}.override_config.{key}=32768"
    script = GRPO.replace("Qwen/Qwen2.5-7B-Instruct", model) + f"+{argument} data.max_response_length=8192"
    recipe, remarks = content(script), convert(script).remarks
    assert recipe["defaults"][0] == {"/model@models.policy": card}
    assert recipe["models"]["policy"]["architecture"] == {"max_position_embeddings": 32768}
    assert "must be in the config.json" in remarks[argument]
    (tmp_path / "run.sh").write_text(script.replace(f"+{argument}", ""))
    assert run_subcommand("convert", [str(tmp_path / "run.sh")]) == 2, "4096 positions, and no recipe that is refused"


@pytest.mark.parametrize(
    ("files", "sets"),
    [
        ("d/aime.parquet", {"aime": "d/aime.parquet"}),
        ("e/test.parquet", {"test": "e/test.parquet"}),
        ("[a/test.parquet,b/test.parquet]", {"test": "a/test.parquet", "b_test_1": "b/test.parquet"}),
        ("'$HOME/math 500.jsonl'", {"math_500": "~/math 500.jsonl"}),
    ],
)
def test_files_to_validate_on_are_sets_of_the_evaluation(files: str, sets: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(convert(f'{GRPO} data.val_files="{files}" trainer.test_freq=5').recipe)
    evaluation = rlflow.load([f"recipe={file}"]).evaluation
    assert evaluation is not None
    assert {name: evaluated.source for name, evaluated in evaluation.sets.items()} == sets
    assert {evaluated.columns["answer"] for evaluated in evaluation.sets.values()} == {"reward_model.ground_truth"}


@pytest.mark.parametrize(
    "arguments",
    [
        "reward_model.enable=True reward_model.model.path=my/rm",
        "reward.reward_model.enable=True reward.reward_model.model_path=my/rm",
        "reward_model.enable=True reward_model.model.path=my/rm algorithm.adv_estimator=remax",
    ],
)
def test_a_reward_model_is_a_role(arguments: str) -> None:
    recipe = content(GRPO + arguments)
    assert recipe["models"]["reward"] == {"path": "my/rm"}
    assert recipe["roles"]["reward"] == {"model": "reward", "engine": "deepspeed"}
    assert recipe["graph"]["rewards"] == {"node": "reward_model", "role": "reward"}
    assert recipe["graph"].get("greedy_rewards", recipe["graph"]["rewards"])["node"] == "reward_model"
    assert "columns" not in recipe["data"]


@pytest.mark.parametrize(
    ("arguments", "term"),
    [
        ("custom_reward_function.path=FILE", {"compute_score": {"function": "mine:compute_score", "style": "verl"}}),
        (
            "reward.custom_reward_function.path=FILE reward.custom_reward_function.name=f",
            {"f": {"function": "mine:f", "style": "verl"}},
        ),
        (
            "custom_reward_function.path=FILE reward_model.reward_manager=batch "
            "+custom_reward_function.reward_kwargs.strict=True",
            {"compute_score": {"function": "mine:compute_score", "style": "verl_batch", "options": {"strict": True}}},
        ),
    ],
)
def test_a_reward_function_that_exists_is_called_as_verl_does(
    arguments: str, term: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    converted = convert(GRPO + arguments.replace("FILE", "rewards/mine.py"))
    assert yaml.safe_load(converted.recipe)["graph"]["rewards"] == {"node": "reward", "functions": term}
    assert "PYTHONPATH" in converted.remarks["graph.rewards.functions"]


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct", "OpenGVLab/InternVL2-1B"]
)
def test_a_model_that_reads_images_is_refused(model: str) -> None:
    with pytest.raises(RecipeError, match=f"'{model}' reads images"):
        convert(GRPO.replace("Qwen/Qwen2.5-7B-Instruct", model))


@pytest.mark.parametrize("arguments", ["trainer.val_only=True", "+trainer.val_only=true"])
def test_a_script_that_only_evaluates_is_refused(arguments: str) -> None:
    with pytest.raises(RecipeError, match="the script trains nothing"):
        convert(GRPO + arguments)


@pytest.mark.parametrize(
    ("arguments", "update"),
    [
        ("clip_ratio_low=10 {}.clip_ratio_high=0.2", {"clip_eps_high": 0.2}),
        ("clip_ratio_high=0.28", {"clip_eps": 0.2, "clip_eps_high": 0.28}),
    ],
)
def test_cispo_has_its_own_loss(arguments: str, update: dict[str, Any]) -> None:
    script = f"{GRPO} {ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.{arguments.format(ACTOR)}"
    assert content(script)["graph"]["update"] == {
        "node": "cispo_update",
        "role": "actor",
        "num_minibatches": 4,
        **update,
    }


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
    """What only the shell knows is a text in the recipe, and refers to nothing."""
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


@pytest.mark.parametrize(
    ("beginning", "role"),
    [
        *((f"{ACTOR}.", "actor"), (f"{MODEL}.", "actor"), (f"{ROLLOUT}.", "rollout")),
        *(("actor_rollout_ref.ref.", "reference"), ("critic.", "critic"), ("critic.model.", "critic")),
        *(("reward_model.", "reward"), ("reward_model.rollout.", "reward"), ("reward.reward_model.rollout.", "reward")),
    ],
)
def test_a_remark_names_keys_of_its_own_role(beginning: str, role: str) -> None:
    """Except how logprobs of the rollouts are computed, which is the actor's work."""
    options = (
        *("megatron.tensor_model_parallel_size", "tensor_model_parallel_size", "ulysses_sequence_parallel_size"),
        *("gpu_memory_utilization", "fsdp_config.param_offload", "fsdp_config.fsdp_size", "micro_batch_size_per_gpu"),
        *("enable_gradient_checkpointing", "strategy", "enforce_eager", "nccl_timeout", "nnodes", "optim.lr"),
    )
    for option in options:
        for roles in (ROLES, ("actor", "rollout")):
            reason = reason_without_place(beginning + option, roles)
            assert not [other for other in ROLES if other != role and f"roles.{other}." in reason], (option, reason)
    assert "roles.actor.micro_batch_tokens" in reason_without_place(f"{ROLLOUT}.log_prob_micro_batch_size", ROLES)
