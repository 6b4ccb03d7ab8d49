"""The arguments of ``verl.trainer.main_ppo``: their defaults, and which of them have no place in a recipe."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.errors import RecipeError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# verl's defaults (0.9.1) of the arguments that a recipe states.
DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.seed": None,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.lr_warmup_steps": -1,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16.0,
    "actor_rollout_ref.model.target_modules": "all-linear",
    "algorithm.kl_penalty": "kl",
    "algorithm.filter_groups.enable": False,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1.0,
    "critic.optim.lr": 1e-5,
    "critic.optim.lr_warmup_steps": -1,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "critic.optim.weight_decay": 0.01,
    "critic.grad_clip": 1.0,
    "critic.cliprange_value": 0.5,
    "trainer.critic_warmup": 0,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}
# Arguments whose null means another argument, or no limit.
NULLABLE = {f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio_c", "critic.cliprange_value"}
NULLABLE |= {f"{of}.optim.lr_warmup_steps" for of in (ACTOR, "critic")}
# Arguments that a recipe counts or divides with.
SIZES = {
    *("data.train_batch_size", "data.max_prompt_length", "data.max_response_length", "trainer.nnodes"),
    *("trainer.n_gpus_per_node", "trainer.total_training_steps", "trainer.max_actor_ckpt_to_keep", f"{ROLLOUT}.n"),
    *(f"{of}.{name}" for of in (ACTOR, "critic") for name in ("ppo_mini_batch_size", "ppo_epochs")),
}
KL_ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "kl": "k1", "k1": "k1"}
AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
OVERLONG = {"error": "error", "left": "truncate_left"}
# Why arguments have no place in a recipe, by patterns; the first that fits counts.
WITHOUT_PLACE: Mapping[str, str] = {
    "*micro_batch_size*": "the planner chooses the tokens of a pass (roles.ROLE.micro_batch_tokens pins them)",
    "*max_token_len_per_gpu": "the planner chooses the tokens of a pass (roles.ROLE.micro_batch_tokens pins them)",
    "*dynamic_bsz": "passes always have about equally many tokens",
    "*remove_padding": "nothing is ever padded",
    "*offload": "the planner offloads where memory needs it (roles.ROLE.offload pins it)",
    "*gradient_checkpointing": "the planner decides (roles.actor.gradient_checkpointing pins it)",
    "*sequence_parallel_size": "the planner chooses it (roles.actor.sequence_parallel_size pins it)",
    "*tensor_model_parallel_size": "the planner chooses it (roles.rollout.tensor_parallel_size pins it)",
    "*gpu_memory_utilization": "the planner chooses it (roles.rollout.gpu_memory_utilization pins it)",
    "*enforce_eager": "CUDA graphs are used where memory has room (roles.rollout.eager pins it)",
    "*free_cache_engine": "engines that share GPUs with training release their memory while it runs",
    "*strategy": "training uses DeepSpeed; the planner chooses its ZeRO stage",
    "*fsdp*": "training uses DeepSpeed; the planner chooses its ZeRO stage",
    "*megatron.*": "training uses DeepSpeed; the planner chooses its ZeRO stage",
    "*rollout.*_parallel_size": "the planner chooses how many engines there are, and how many GPUs each has",
    "*trust_remote_code": "models.policy.trust_remote_code: true, if you trust the Python files beside the model",
    "*max_num_batched_tokens": "vLLM's own default is used",
    "*max_num_seqs": "follows from the memory of the KV cache",
    "*chunked_prefill": "vLLM's own default is used",
    "*load_format": "weights always come from the trained role",
    "*val_kwargs*": "evaluation.num_responses, temperature and top_p; one response has the likeliest tokens",
    "*rollout.name": "the engine is vLLM",
    "*rollout.mode": "the engine is vLLM, with an asynchronous scheduler",
    "*rollout.top_k": "not supported: all tokens are sampled from, as with -1",
    "*rollout.calculate_log_probs": "engines always return them",
    "*rollout.multi_turn.*": "the node converse in place of generate; see docs/environments.md",
    "algorithm.filter_groups.max_num_gen_batches": "graph.sampling.max_rounds, which is 10 by default",
    "algorithm.filter_groups.metric": "groups are compared by graph.rewards, before a penalty for length",
    "algorithm.rollout_correction.*": "graph.update.correction has other options; see docs/algorithms.md",
    "algorithm.kl_ctrl.type": "the coefficient is fixed, unless kl_target is set",
    "algorithm.kl_ctrl.*": "kl_target, which is in nats per response; verl's target_kl is in nats per token",
    "*optim.min_lr_ratio": "schedules end at a learning rate of 0",
    "*optim.num_cycles": "schedules end at a learning rate of 0",
    "critic.loss_agg_mode": "every token has the same weight",
    "data.gen_batch_size": "every round generates for the prompts that are missing (expect.rounds for the plan)",
    "*torch_compile": "not supported",
    "*.override_config.*": "the model's own config.json counts",
    "*use_shm": "models are loaded from their folder",
    "*layered_summon": "weights go to the engines without a copy of all of them",
    "data.val_batch_size": "the whole evaluation is one batch",
    "data.shuffle": "rows are always shuffled, by the seed",
    "data.return_raw_chat": "not needed",
    "trainer.logger": "trackers in the recipe, as trackers: [tensorboard, wandb]",
    "trainer.*_name": "a run is known by its folder",
    "trainer.default_local_dir": "hydra.run.dir on the command line",
    "trainer.default_hdfs_dir": "not supported",
    "trainer.resume*": "resume= on the command line",
    "trainer.test_freq": "nothing is evaluated before data.eval_split names rows for it",
    "trainer.val_before_train": "evaluation begins before training",
    "trainer.log_val_generations": "samples.jsonl has responses of every step",
    "*checkpoint_engine.*": "weights go to the engines without a copy of all of them",
    "*legacy_worker_impl": "not needed",
    "trainer.balance_batch": "tokens are always balanced among ranks",
    "trainer.max_critic_ckpt_to_keep": "checkpoints.keep, which counts whole checkpoints",
    "critic.*": "only PPO has a critic, and it has no such option",
    "ray_kwargs.*": "the cluster's own settings; see docs/clusters.md",
    "*reward_manager*": "rewards are nodes of the graph; see docs/rewards.md",
    "*overlong_buffer*.log": "metrics always have it",
    "*reward_kwargs.max_resp_len": "a penalty for length has data.max_response_length",
    "*reward_model.*": "a reward model is a role; see the node 'reward_model' in docs/rewards.md",
}


@dataclass
class Arguments:
    """The arguments of a script, and what has been found out about them."""

    values: Mapping[str, Any]
    """The value of each argument, by its key."""
    remarks: dict[str, str]
    """Why a word of the command or an argument has no place in the recipe; and what a person must check."""
    used: set[str] = field(default_factory=set)
    """The arguments that were asked for."""

    def check(self) -> None:
        """Raise RecipeError for values that verl would not take either, such as a variable of the shell."""
        for key, value in self.values.items():
            _check_value(key, value)

    def get(self, key: str) -> Any:
        """Return the value of an argument, verl's default, or None."""
        self.used.add(key)
        return self.values.get(key, DEFAULTS.get(key))

    def note(self, what: str, remark: str) -> None:
        """Add a remark about an argument, or about a part of the recipe."""
        self.remarks[what] = remark


def _check_value(key: str, value: Any) -> None:
    default = DEFAULTS.get(key)
    if value is None and (key in NULLABLE or default is None):
        return
    if key in SIZES:
        is_right, expected = type(value) is int and value >= 1, "a whole number from 1"
    elif isinstance(default, bool):
        is_right, expected = isinstance(value, bool), "True or False"
    elif isinstance(default, int):
        is_right, expected = type(value) is int, "a whole number"
    elif isinstance(default, float):
        is_right, expected = type(value) in (int, float) and math.isfinite(value), "a number"
    else:
        is_right, expected = default is None or isinstance(value, str), "a text"
    if not is_right:
        raise RecipeError(key, f"expected {expected}, got '{value}'", fix="write the value itself")
