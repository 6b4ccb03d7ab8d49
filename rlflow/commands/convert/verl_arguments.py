"""The arguments of ``verl.trainer.main_ppo``, with their defaults."""

import math
import re
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
    "data.image_key": "images",
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
    f"{ACTOR}.freeze_vision_tower": False,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16.0,
    "algorithm.kl_penalty": "kl",
    "algorithm.filter_groups.enable": False,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.bypass_mode": False,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.n_agent": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1.0,
    "critic.optim.lr": 1e-5,
    "critic.optim.lr_warmup_steps": -1,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "critic.optim.weight_decay": 0.01,
    "critic.grad_clip": 1.0,
    "critic.cliprange_value": 0.5,
    "critic.model.lora_rank": 0,
    "reward_model.enable": False,
    "reward.reward_model.enable": False,
    f"{ROLLOUT}.val_kwargs.n": 1,
    "trainer.critic_warmup": 0,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.val_only": False,
    "distillation.enabled": False,
    "rollout.n_gpus_per_node": 8,
    "rollout.nnodes": 1,
}
# Arguments whose null means another argument, or no limit.
NULLABLE = {f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio_c", "critic.cliprange_value"}
NULLABLE |= {"trainer.save_freq", "trainer.test_freq", *(f"{of}.optim.lr_warmup_steps" for of in (ACTOR, "critic"))}
# Arguments that a recipe counts or divides with.
SIZES = {
    *("data.train_batch_size", "data.max_prompt_length", "data.max_response_length", "trainer.nnodes"),
    *("trainer.n_gpus_per_node", "trainer.total_training_steps", "trainer.max_actor_ckpt_to_keep", f"{ROLLOUT}.n"),
    *(f"{ROLLOUT}.n_agent", f"{ROLLOUT}.val_kwargs.n", "rollout.nnodes", "rollout.n_gpus_per_node"),
    *(f"{of}.{name}" for of in (ACTOR, "critic") for name in ("ppo_mini_batch_size", "ppo_epochs")),
}
KL_ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "kl": "k1", "k1": "k1"}
AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
_REFERENCE = re.compile(r"\$\{([\w.]+\.\w+)\}")


@dataclass
class Arguments:
    """The arguments of a script, and what has been found out about them."""

    values: Mapping[str, Any]
    """The value of each argument, by its key."""
    remarks: dict[str, str]
    """Why a word of the command or an argument has no place in the recipe; and what a person must check."""
    is_one_step_off: bool = False
    """The script is for verl's trainer that generates one step ahead, on GPUs of its own."""
    used: set[str] = field(default_factory=set)
    """The arguments that were asked for."""

    def get(self, key: str) -> Any:
        """Return the value of an argument, verl's default, or None.

        Raises RecipeError for a value that verl would not take either. A number that only the shell knows is verl's
        default, with a remark.
        """
        self.used.add(key)
        default = DEFAULTS.get(key)
        value = self.values.get(key, default)
        if isinstance(value, str) and (reference := _REFERENCE.fullmatch(value)):
            return self.get(reference[1])
        if isinstance(value, str) and "$" in value and (key in SIZES or isinstance(default, int | float)):
            guess = "nothing" if default is None else default
            self.note(f"{key}={value}", f"is only known when the script runs; {guess} stands for it, write the number")
            return default
        _check_value(key, value)
        return value

    def first(self, *keys: str) -> Any:
        """Return the value of the first of these arguments that the script has: names of different versions of verl."""
        values = [self.get(key) for key in keys]
        return next((value for value in values if value not in (None, False)), values[-1])

    def note(self, what: str, remark: str) -> None:
        """Add a remark about an argument, or about a part of the recipe."""
        self.remarks[what] = remark


def from_home(path: str) -> str:
    """Return a path with ``~`` for the home folder, which rlflow knows as the shell does."""
    return re.sub(r"^\$HOME(?=/)", "~", path)


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
