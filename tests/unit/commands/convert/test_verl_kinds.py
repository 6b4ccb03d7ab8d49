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
    more = f"{fsdp} '{MODEL}.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]'"
    assert content(GRPO + more)["roles"]["actor"]["lora"] == lora | {"merge": True, "experts": True}
    merged = f"{GRPO + fsdp} {MODEL}.lora.merge=True"
    assert content(merged)["roles"]["actor"]["lora"] == lora | {"merge": True}


@pytest.mark.parametrize("key", ["lora_adapter_path", "lora.adapter_path"])
def test_an_adapter_to_continue_is_not_full_training(key: str) -> None:
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
    # The model on the hub has 4096 positions, and a recipe that is refused is not written.
    assert run_subcommand("convert", [str(tmp_path / "run.sh")]) == (2 if model.startswith("Qwen/") else 0)


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
    "model", ["Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct", "OpenGVLab/InternVL2-1B"]
)
def test_other_models_that_read_images_are_refused(model: str) -> None:
    with pytest.raises(RecipeError, match=f"'{model}' reads images"):
        convert(GRPO.replace("Qwen/Qwen2.5-7B-Instruct", model))


@pytest.mark.parametrize(
    ("arguments", "train", "columns"),
    [
        ("", "all", {}),
        (f" {ACTOR}.freeze_vision_tower=True data.image_key=pictures", None, {"images": "pictures"}),
    ],
)
def test_a_model_that_reads_images(arguments: str, train: str | None, columns: dict[str, str]) -> None:
    script = GRPO.replace("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct")
    converted = content(f"{script} data.truncation=left{arguments}")
    assert converted["roles"]["actor"].get("train") == train
    assert converted["data"]["overlong"] == "drop"
    columns_of_text = content(GRPO)["data"].get("columns", {})
    assert converted["data"].get("columns", {}) == {**columns_of_text, **columns}
    remarks = convert(f"{GRPO}{arguments}").remarks
    assert all("reads text alone" in remarks[argument] for argument in arguments.split())


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


@pytest.mark.parametrize(
    "arguments",
    [
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "data.apply_chat_template_kwargs={enable_thinking:False}",
    ],
)
def test_arguments_of_the_chat_template(arguments: str) -> None:
    assert content(GRPO + arguments)["data"]["template_options"] == {"enable_thinking": False}


@pytest.mark.parametrize("key", ["reward_model.rollout.name", "+reward_model.reward_models.judge.model.path"])
def test_a_model_that_a_function_asks_is_no_reward_model(key: str) -> None:
    judge = f"reward_model.enable=True {key}=x custom_reward_function.path=judge.py"
    converted = convert(GRPO + judge)
    assert "reward" not in yaml.safe_load(converted.recipe)["roles"]
    assert "serve it yourself" in converted.remarks["reward_model.enable=True"]


@pytest.mark.parametrize("key", ["ref.model.path", "ref.model_path"])
def test_a_reference_may_be_another_model(key: str) -> None:
    recipe = content(f"{GRPO} {KL} actor_rollout_ref.{key}=my/teacher")
    assert recipe["models"] == {"reference": {"path": "my/teacher"}}
    assert recipe["roles"]["reference"]["model"] == "reference"


@pytest.mark.parametrize(
    ("path", "card"),
    [
        ("Qwen/Qwen2.5-7B", "qwen2_5_7b"),
        ("Qwen/Qwen2-7B-Instruct", "qwen2_5_7b"),
        ("/m/Qwen2.5-Coder-32B-Instruct", "qwen2_5_32b"),
        ("$ROOT/multiturn-sft-qwen-2.5-7b-instruct/global_step_372", "qwen2_5_7b"),
        ("my/Qwen2.5-Math-7B-16k-think", "qwen2_5_math_7b"),
        ("ckpt/DeepSeek-R1-Distill-Qwen-7B-sft", "deepseek_r1_distill_qwen_7b"),
        ("meta-llama/Llama3.1-8B-Instruct", "llama3_1_8b"),
        ("my/own-7b", None),
        ("my/Qwen3-80B", None),
        ("x/Qwen2.5-7Bx", None),
    ],
)
def test_a_model_has_the_sizes_that_its_name_says(path: str, card: str | None) -> None:
    recipe = content(GRPO.replace("Qwen/Qwen2.5-7B-Instruct", path))
    assert recipe.get("defaults", [None])[0] == (card and {"/model@models.policy": card})
    assert recipe["models"]["policy"] == {"path": path, **({"architecture_of": path} if card else {})}


@pytest.mark.parametrize(
    ("arguments", "sampling"),
    [
        ("n=8 {}.temperature=0.6 {}.top_p=0.95", {"num_responses": 8, "temperature": 0.6, "top_p": 0.95}),
        ("n=8", {}),
        ("temperature=0.6", {}),
    ],
)
def test_responses_of_the_evaluation(arguments: str, sampling: dict[str, Any]) -> None:
    """verl validates at a temperature of 0 unless the script says otherwise."""
    key = f"{ROLLOUT}.val_kwargs"
    converted = convert(f"{GRPO} data.val_files=v.parquet trainer.test_freq=5 {key}.{arguments.format(key, key)}")
    evaluation = yaml.safe_load(converted.recipe)["evaluation"]
    assert {name: evaluation[name] for name in evaluation.keys() - {"every", "num_prompts", "sets"}} == sampling
    assert any(key in remark for remark in converted.remarks) == (sampling == {})


@pytest.mark.parametrize("path", ["/models/Qwen2.5-Math-7B", "my/Qwen2.5-Math-7B-16k-think"])
def test_a_copy_of_a_model_may_have_more_positions(path: str) -> None:
    script = GRPO.replace("Qwen/Qwen2.5-7B-Instruct", path) + "data.max_prompt_length=1024 data.max_response_length="
    assert content(script + "8192")["models"]["policy"]["architecture"] == {"max_position_embeddings": 9216}
    assert "architecture" not in content(script + "1024")["models"]["policy"]


def test_the_config_of_a_model_on_this_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "Qwen2.5-7B").mkdir()
    (tmp_path / "Qwen2.5-7B" / "config.json").write_text("{}")
    converted = convert(GRPO.replace("Qwen/Qwen2.5-7B-Instruct", f"{tmp_path}/Qwen2.5-7B"))
    assert yaml.safe_load(converted.recipe)["models"]["policy"] == {"path": f"{tmp_path}/Qwen2.5-7B"}
    assert "models.policy.path" not in converted.remarks
