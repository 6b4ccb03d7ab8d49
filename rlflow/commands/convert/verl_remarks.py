"""The reasons why arguments of verl have no place in a recipe."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

# The role that arguments with this beginning are about.
_ROLES: Mapping[str, str] = {
    "actor_rollout_ref.actor.": "actor",
    "actor_rollout_ref.ref.": "reference",
    "actor_rollout_ref.rollout.": "rollout",
    "actor_rollout_ref.model.": "actor",
    "critic.": "critic",
    "reward_model.": "reward",
    "reward.reward_model.": "reward",
}
_WITHOUT_ROLE: Mapping[str, str] = {
    "reference": "the script has no reference model of its own",
    "critic": "only PPO has a critic",
    "reward": "the script has no reward model",
}
# Options below reward_model that are about functions.
_ABOUT_FUNCTIONS = ("reward_manager", "reward_kwargs", "launch", "sandbox", "num_")
_ZERO = "training uses DeepSpeed; the planner chooses its ZeRO stage (roles.{role}.zero_stage pins it)"
_PASSES = "the planner chooses the tokens of a pass (roles.{role}.micro_batch_tokens pins them)"
_PROFILES = "profile= on the command line; see docs/metrics.md"
_TURNS = "turns are the node converse in place of generate; see docs/environments.md"
_REWARDS = "rewards are nodes of the graph; see docs/rewards.md"
_FORMAT = "checkpoints have all that a run needs to resume, and its end exports the model"
# In these tables a reason has one or more patterns; the first that fits counts.
_TRAINED: Mapping[str, str] = {
    "*micro_batch_size* *max_token_len_per_gpu": _PASSES,
    "*dynamic_bsz": "passes always have about equally many tokens",
    "*offload*": "the planner offloads where memory needs it (roles.{role}.offload pins it)",
    "*gradient_checkpointing*": "the planner decides (roles.{role}.gradient_checkpointing pins it)",
    "*ulysses*": "the planner chooses it (roles.{role}.sequence_parallel_size pins it)",
    "*context_parallel_size": "the planner divides sequences (roles.{role}.sequence_parallel_size pins it)",
    "*megatron.* *fsdp* *veomni* *torchtitan* *strategy": _ZERO,
    "checkpoint.*": _FORMAT,
    "*lora*": "not supported for this role: all of its weights are trained",
    "*.lr_warmup_init": "a warm-up begins at a learning rate of 0",
    "*optim.*": "roles.{role}.optimizer has learning_rate, schedule, warmup_steps, betas and weight_decay",
    "*profiler*": _PROFILES,
    "*torch_compile": "decoder layers are compiled on GPUs (TORCH_COMPILE_DISABLE=1 turns it off)",
    "*entropy_*": "entropies are computed in parts where memory needs it",
    "*router_replay*": "not supported: experts are chosen anew in training",
    "*qat*": "not supported: weights are trained without quantization",
    "pad_to_length*": "nothing is ever padded",
    "load_weight": "weights are those of models.NAME.path",
    "rollout_n": "follows from graph.rollouts.group_size",
    "nccl_timeout": "roles.{role}.timeout_minutes",
    "freeze_vision*": "the model reads text alone",
    "enable": "the graph says which roles there are",
    "loss_scale_factor loss_agg_mode": "every token has the same weight",
    "shuffle": "rollouts are shuffled in the epochs after the first",
    "data_loader_seed": "every order follows from seed",
}
_MODEL: Mapping[str, str] = {
    "use_remove_padding": "nothing is ever padded",
    "trust_remote_code": "models.NAME.trust_remote_code: true, if you trust the Python files beside the model",
    "*override_config*": "not converted: the config.json of the model counts",
    "use_shm": "models are loaded from their folder",
    "*chat_template": "models.NAME.chat_template, with the text of the template",
    "*tokenizer*": "the tokenizer is the model's own: put it into the model's folder",
    "external_lib": "no module is imported for a model",
    "*hf_config_path": "the config.json of the model's folder counts",
    "*liger": "kernels that save memory are used where they are installed",
    "*fused_kernel*": "logits are computed in parts where memory needs it",
    "*exclude_modules": "roles.{role}.lora.target_modules names the layers that have adapters",
    "mtp.*": "heads for several tokens are not trained",
    "*tiled_mlp*": "the planner chooses the tokens of a pass (roles.{role}.micro_batch_tokens pins them)",
}
_BY_ROLE: Mapping[str, Mapping[str, str]] = {
    "rollout": {
        "log_prob_*": _PASSES.format(role="actor"),
        "tensor_model_parallel_size": "the planner chooses it (roles.rollout.tensor_parallel_size pins it)",
        "pipeline_model_parallel_size": "the planner chooses it (roles.rollout.pipeline_parallel_size pins it)",
        "*_parallel_size": "the planner chooses how many engines there are, and how many GPUs each has",
        "gpu_memory_utilization": "the planner chooses it (roles.rollout.gpu_memory_utilization pins it)",
        "enforce_eager cudagraph*": "CUDA graphs are used where memory has room (roles.rollout.eager pins it)",
        "free_cache_engine": "engines that share GPUs with training release their memory while it runs",
        "multi_stage_wake_up": "engines that share GPUs with training release their memory while it runs",
        "max_num_batched_tokens *chunked_prefill *prefix_caching scheduling_policy": "vLLM's own default is used",
        "max_num_seqs": "follows from the memory of the KV cache",
        "max_model_len *_length": "follows from data.max_prompt_tokens and graph.rollouts.max_tokens",
        "dtype": "models.policy.dtype, which is bfloat16 by default",
        "load_format": "weights always come from the trained role",
        "*val*": "evaluation.num_responses, temperature and top_p; one response has the likeliest tokens",
        "name": "the engine is vLLM",
        "mode": "the engine is vLLM, with an asynchronous scheduler",
        "engine_kwargs*": "the engine is vLLM, with the options that the plan has",
        "top_k": "not supported: all tokens are sampled from, as with -1",
        "do_sample": "graph.rollouts.temperature: 0 takes the likeliest tokens",
        "ignore_eos": "not supported: a response ends with its end token",
        "*penalty use_fire_sampling": "not supported: sampling has temperature and top_p",
        "calculate_log_probs": "engines always return them",
        "logprobs_mode": "engines return those of the distribution that they sample from",
        "multi_turn* agent* chat_scheduler": _TURNS,
        "*layered_summon checkpoint_engine*": "weights go to the engines without a copy of all of them",
        "update_weights_bucket*": "weights go to the engines without a copy of all of them",
        "disable_log_stats": "metrics.jsonl has what the engines measured",
        "trace.*": "samples.jsonl has responses of every step",
        "seed full_determinism": "every random number follows from seed",
        "skip_tokenizer_init": "engines get and return tokens",
        "*nnodes *gpus_per_node": "the planner decides which GPUs generate (roles.rollout.gpus pins their number)",
        "profiler*": _PROFILES,
        "over_sample_rate": "not supported: every sample is finished",
        "*routing_replay": "not supported: experts are chosen anew in training",
        "quantization* qat": "not supported: engines have the weights as they are trained",
        "prometheus*": "metrics.jsonl has what the engines measured",
        "skip_*": "finished responses are kept in the run's folder and used again when it resumes",
        "disaggregation*": "the planner chooses how many engines there are, and how many GPUs each has",
        "layer_name_map*": "not needed",
        "*": "not known to rlflow",
    },
    "actor": {
        "state_masking": "only the model's own tokens are trained on",
        "policy_loss.*": "only for the loss that policy_loss.loss_mode names",
        "tis_imp_ratio_cap": "no correction, as with a cap of 0 or below",
        "calculate_entropy": "entropy is always a metric",
        "kl_loss_*": "only with actor_rollout_ref.actor.use_kl_loss=True",
        "tau_*": "only for the loss sapo",
        "loss_scale_factor": "only for loss_agg_mode=seq-mean-token-sum-norm",
        "use_rollout_log_probs": "without the node old_logprobs, the sampler's own logprobs count",
        "lora* target_modules": "only with actor_rollout_ref.model.lora_rank",
    },
    "reward": {
        "*input_tokenizer": "the reward model must have the policy's tokenizer: it scores the policy's tokens",
        "*reward_manager*": _REWARDS,
        "*max_length": "the reward model scores whole responses",
        "*rollout.*": "the reward model has an engine that scores, and none that generates",
        "*nnodes": "the planner decides which GPUs the reward model has (roles.reward.gpus pins their number)",
        "*gpus_per_node": "the planner decides which GPUs the reward model has (roles.reward.gpus pins their number)",
        "*resource_pool": "the planner decides which GPUs the reward model has (roles.reward.colocate pins it)",
    },
}
# Arguments that are not about a role.
_OTHERS: Mapping[str, str] = {
    "algorithm.filter_groups.metric": "groups are compared by graph.rewards, before a penalty for length",
    "algorithm.filter_groups.*": "only with algorithm.filter_groups.enable=True",
    "algorithm.rollout_correction.rollout_is*": "only with algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_*": "graph.update.correction has other options; see docs/algorithms.md",
    "algorithm.kl_ctrl.type": "the coefficient is fixed, unless kl_target is set",
    "algorithm.kl_ctrl.kl_coef": "only with algorithm.use_kl_in_reward=True, which versions of verl before 0.3 imply",
    "algorithm.kl_penalty": "only with algorithm.use_kl_in_reward=True, which versions of verl before 0.3 imply",
    "algorithm.kl_ctrl.*": "kl_target, which is in nats per response; verl's target_kl is in nats per token",
    "algorithm.gamma": "only PPO and REINFORCE++ discount rewards",
    "algorithm.lam": "only PPO estimates advantages with it",
    "algorithm.norm_adv_by_std_in_grpo": "only for GRPO",
    "algorithm.*pf_ppo*": "not supported: no rollout is weighted by its reward",
    "data.gen_batch_size": "every round generates for the prompts that are missing (expect.rounds for the plan)",
    "data.val_batch_size data.validation_shuffle": "the whole evaluation is one batch",
    "data.max_start_length data.max_obs_length do_search": _TURNS,
    "data.shuffle*": "rows are always shuffled, by the seed",
    "data.return_* data.dataloader_num_workers data.filter_overlong_prompts_workers": "not needed",
    "data.trust_remote_code": "no code of a data set is run",
    "data.tokenizer": "the tokenizer is the model's own",
    "data.use_shm": "files are read where they are",
    "data.reward_fn_key": "one reward judges all rows; a function of style verl receives data_source",
    "data.image_key": "the model reads text alone",
    "data.video_* data.audio_key": "videos and audio are not supported",
    "data.image_* data.mm_*": "the model's own image processor decides; data.image has limits",
    "data.custom_cls* data.datagen*": "data.source may be a function of your own: package.module:function",
    "data.sampler*": "rows are shuffled, by the seed",
    "data.train_max_samples data.train_data_num": "data.split: 'train[:N]' uses the first N rows",
    "data.val_max_samples data.val_data_num": "evaluation.num_prompts uses the first rows",
    "data.*tool*": _TURNS,
    "actor_rollout_ref.hybrid_engine": "the planner decides which roles share GPUs (roles.rollout.colocate pins it)",
    "actor_rollout_ref.nccl_timeout": "roles.ROLE.timeout_minutes",
    "trainer.logger": "trackers in the recipe, as trackers: [tensorboard, wandb]",
    "trainer.*_name": "a run is known by its folder",
    "trainer.default_local_dir": "hydra.run.dir on the command line",
    "trainer.default_hdfs_dir": "not supported: outputs are written into the run's folder",
    "trainer.resume*": "resume= on the command line",
    "trainer.test_freq": "nothing is evaluated before data.eval_split names rows for it",
    "trainer.val_before_train": "evaluation begins before training",
    "trainer.val_only": "the recipe trains",
    "trainer.*generations* trainer.*_data_dir": "samples.jsonl has responses of every step",
    "trainer.balance_batch": "tokens are always balanced among ranks",
    "trainer.max_critic_ckpt_to_keep": "checkpoints.keep, which counts whole checkpoints",
    "trainer.*ckpt*": "checkpoints.keep says how many checkpoints are kept",
    "trainer.esi_redundant_time": "a signal ends a run with a checkpoint; see docs/reliability.md",
    "trainer.device": "the cluster says which GPUs there are",
    "trainer.ray_wait*": "the cluster's own settings; see docs/clusters.md",
    "trainer.rollout_data_dir": "samples.jsonl has responses of every step",
    "trainer.use_legacy_worker_impl trainer.use_v1": "not needed",
    "trainer.v1*": "overlap: {max_staleness: 1} generates ahead of training; see docs/clusters.md",
    "*profile* *nsight*": _PROFILES,
    "ray_kwargs.* ray_init.*": "the cluster's own settings; see docs/clusters.md",
    "*overlong_buffer*.log": "metrics always have it",
    "*overlong_buffer*": "only with overlong_buffer.enable=True",
    "*reward_kwargs.max_resp_len": "a penalty for length has data.max_response_length",
    "*custom_reward_function*": "options of a function are graph.rewards.functions.NAME.options",
    "*sandbox_fusion*": "programs run in rlflow's own sandbox; see docs/rewards.md",
    "*reward_manager* *reward_fn* reward*": _REWARDS,
    "distillation.*": "only with distillation.enabled=True",
    "hydra.*": "options of Hydra are not read",
    "transfer_queue.*": "tokens travel through the hosts' object stores",
    "async_training.*": "overlap: {max_staleness: 1} generates ahead of training; see docs/clusters.md",
    "skip.*": "finished responses are kept in the run's folder and used again when it resumes",
    "global_batch_size": "data.batch_size",
    "max_turns": "turns are the node converse in place of generate, with max_turns; see docs/environments.md",
    "retriever.* agent.* env.*": _TURNS,
}


def reason_without_place(key: str, roles: Collection[str]) -> str:
    """Return why an argument has no place in a recipe with these roles. A remark names keys of the argument's role."""
    if reason := _fitting(key, {patterns: why for patterns, why in _OTHERS.items() if "overlong" in patterns}):
        return reason
    beginning = next((beginning for beginning in _ROLES if key.startswith(beginning)), None)
    if beginning is None:
        return _fitting(key, _OTHERS) or "not known to rlflow"
    role, rest = _ROLES[beginning], key.removeprefix(beginning)
    rest = rest.removeprefix("model.")
    tables = [_BY_ROLE.get(role, {}), _MODEL, _TRAINED]
    if role not in roles and role != "reference" and not rest.startswith(_ABOUT_FUNCTIONS):
        return _WITHOUT_ROLE[role]
    reason = next((why for table in tables if (why := _fitting(rest, table))), None)
    reason = (reason or _fitting(key, _OTHERS) or "not known to rlflow").format(role=role)
    return reason if role in roles or role == "reward" else f"{_WITHOUT_ROLE[role]}; with one, {reason}"


def _fitting(key: str, reasons: Mapping[str, str]) -> str | None:
    return next(
        (why for patterns, why in reasons.items() if any(fnmatchcase(key, one) for one in patterns.split())), None
    )
