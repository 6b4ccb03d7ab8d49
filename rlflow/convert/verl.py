"""Scripts of verl as recipes.

A recipe trains as its script does with verl's defaults; how it is laid out on GPUs is left to the planner. Every
argument has a place in the recipe, or a remark that says why it has none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from rlflow.compose import CONF
from rlflow.convert.shell import read_arguments
from rlflow.convert.verl_arguments import ACTOR, AGGREGATIONS, DEFAULTS, KL_ESTIMATORS, OVERLONG, ROLLOUT, WITHOUT_PLACE
from rlflow.errors import RecipeError


@dataclass(frozen=True)
class Converted:
    """A recipe made of a script."""

    recipe: str
    """The text of the recipe."""
    cluster: str
    """The shape of the script's cluster, for ``cluster=``."""
    remarks: Mapping[str, str]
    """For each argument without a place in the recipe, why; and what a person must check."""


class _Arguments:
    """The arguments of a script. It notes which of them were asked for."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self.used: set[str] = set()

    def get(self, key: str) -> Any:
        """Return the value of an argument, verl's default, or None."""
        self.used.add(key)
        return self._given.get(key, DEFAULTS.get(key))

    def has(self, key: str) -> bool:
        return key in self._given


def convert(script: str) -> Converted:
    """Convert the text of a script. Raises RecipeError for a script that is not of GRPO or PPO."""
    given = read_arguments(script)
    for key, value in given.items():
        if isinstance(DEFAULTS.get(key), int | float) and not isinstance(value, int | float):
            raise RecipeError(key, f"expected a number, or True or False, got '{value}'", fix="write the value itself")
    arguments, remarks = _Arguments(given), dict[str, str]()
    algorithm = arguments.get("algorithm.adv_estimator")
    if algorithm not in ("grpo", "gae"):
        raise RecipeError(
            "algorithm.adv_estimator", f"'{algorithm}' is not converted", known=["grpo", "gae"],
            fix="algorithm: NAME in a recipe of your own; see docs/algorithms.md",
        )  # fmt: skip
    model = arguments.get("actor_rollout_ref.model.path")
    if not model:
        raise RecipeError("actor_rollout_ref.model.path", "is missing", fix="the arguments of verl.trainer.main_ppo")
    content: dict[str, Any] = {"name": f"{Path(model).name}_{'ppo' if algorithm == 'gae' else 'grpo'}".lower()}
    card = _model_card(model)
    if card is None:
        content["models"] = {"policy": {"path": model}}
    content["steps"] = _steps(arguments, remarks)
    content["roles"] = _roles(arguments, has_critic=algorithm == "gae")
    content["graph"] = _graph(arguments, remarks)
    content["data"] = _data(arguments, remarks)
    if (every := arguments.get("trainer.test_freq")) > 0 and "eval_split" in content["data"]:
        content["evaluation"] = {"every": every, "num_prompts": 512}
        remarks["evaluation.num_prompts"] = "rlflow evaluates the first 512 rows; check the number"
    every = arguments.get("trainer.save_freq")
    content["checkpoints"] = {"every": every if every > 0 else content["steps"]}
    cluster = f"{arguments.get('trainer.nnodes')}x{arguments.get('trainer.n_gpus_per_node')}"
    for key in given.keys() - arguments.used:
        found = next((why for pattern, why in WITHOUT_PLACE.items() if fnmatch(key, pattern)), "not known to rlflow")
        remarks[f"{key}={given[key]}"] = found
    return Converted(_recipe_text(content, card), cluster, dict(sorted(remarks.items())))


def _model_card(path: str) -> str | None:
    """Return the name in conf/model of the model at this path; None if it has none."""
    for file in sorted((CONF / "model").glob("*.yaml")):
        if f": {path}\n" in file.read_text():
            return file.stem
    return None


def _steps(arguments: _Arguments, remarks: dict[str, str]) -> int:
    steps, epochs = arguments.get("trainer.total_training_steps"), arguments.get("trainer.total_epochs")
    if isinstance(steps, int):
        return steps
    remarks["steps"] = f"rows of the data / {arguments.get('data.train_batch_size')}, times {epochs or 30} epochs"
    return 100


def _roles(arguments: _Arguments, *, has_critic: bool) -> dict[str, Any]:
    def optimizer(of: str) -> dict[str, Any]:
        options = {
            "learning_rate": float(arguments.get(f"{of}.optim.lr")),
            "warmup_steps": max(0, arguments.get(f"{of}.optim.lr_warmup_steps") or 0),
            "weight_decay": arguments.get(f"{of}.optim.weight_decay"),
            "max_grad_norm": arguments.get(f"{of}.grad_clip") or 1.0,
        }
        return {
            name: value
            for name, value in options.items()
            if value != {"warmup_steps": 0, "max_grad_norm": 1.0}.get(name)
        }

    actor: dict[str, Any] = {"model": "policy", "engine": "deepspeed", "optimizer": optimizer(ACTOR)}
    rank = arguments.get("actor_rollout_ref.model.lora_rank")
    alpha = arguments.get("actor_rollout_ref.model.lora_alpha")
    if rank:
        actor["lora"] = {"rank": rank, "alpha": float(alpha or 16)}
    roles = {"actor": actor, "rollout": {"model": "policy", "engine": "vllm", "follows": "actor"}}
    if has_critic:
        arguments.get("critic.model.path")
        roles["critic"] = {"model": "policy", "engine": "deepspeed", "optimizer": optimizer("critic")}
    if _has_reference(arguments):
        roles["reference"] = {"model": "policy", "engine": "deepspeed"}
    return roles


def _has_reference(arguments: _Arguments) -> bool:
    return bool(arguments.get(f"{ACTOR}.use_kl_loss") or arguments.get("algorithm.use_kl_in_reward"))


def _graph(arguments: _Arguments, remarks: dict[str, str]) -> dict[str, Any]:
    get = arguments.get
    rollouts = {"node": "generate", "role": "rollout", "group_size": get(f"{ROLLOUT}.n")}
    rollouts["max_tokens"] = get("data.max_response_length")
    rollouts |= {name: get(f"{ROLLOUT}.{name}") for name in ("temperature", "top_p") if get(f"{ROLLOUT}.{name}") != 1}
    graph: dict[str, Any] = {
        "rollouts": rollouts,
        "old_logprobs": {"node": "logprobs", "role": "actor"},
        "rewards": {"node": "reward", "function": "number"},
    }
    # Older versions of verl have this at the top level.
    path, name = (
        get(f"reward.custom_reward_function.{key}") or get(f"custom_reward_function.{key}") for key in ("path", "name")
    )
    source = (
        f"verl calls {path}:{name or 'compute_score'}" if path else "verl chooses the reward by a row's data_source"
    )
    remarks["graph.rewards.function"] = (
        f"{source}; rlflow compares numbers. See docs/rewards.md for functions of your own"
    )
    if _has_reference(arguments):
        graph["reference"] = {"node": "logprobs", "role": "reference"}
    in_reward = float(get("algorithm.kl_ctrl.kl_coef")) if get("algorithm.use_kl_in_reward") else 0.0
    minibatches = max(1, round(get("data.train_batch_size") / get(f"{ACTOR}.ppo_mini_batch_size")))
    epochs = {"num_epochs": get(f"{ACTOR}.ppo_epochs")} if get(f"{ACTOR}.ppo_epochs") != 1 else {}
    if get("algorithm.adv_estimator") == "gae":
        graph["values"] = {"node": "values", "role": "critic"}
        graph["advantages"] = {"node": "gae_advantage", "gamma": get("algorithm.gamma"), "lam": get("algorithm.lam")}
        graph["advantages"] |= {"kl_coef": in_reward, "unbiased": True} if in_reward else {"unbiased": True}
        critic = {"clip_eps": get("critic.cliprange_value"), "num_minibatches": minibatches, **epochs}
        graph["value_update"] = {"node": "value_update", "role": "critic", **critic}
    else:
        normalize = {} if get("algorithm.norm_adv_by_std_in_grpo") else {"normalize": False}
        graph["advantages"] = {"node": "group_advantage", "epsilon": 1e-6, **normalize}
        if in_reward:
            remarks["algorithm.use_kl_in_reward=True"] = (
                "nodes kl_divergence and kl_penalty; see conf/algorithm/rloo.yaml"
            )
    graph["update"] = {"node": "policy_update", "role": "actor", **_loss(arguments, remarks), **epochs}
    graph["update"] |= {"num_minibatches": minibatches} if minibatches > 1 else {}
    if warmup := get("trainer.critic_warmup"):
        graph["update"]["critic_warmup"] = warmup
    return graph


def _loss(arguments: _Arguments, remarks: dict[str, str]) -> dict[str, Any]:
    """Return the options of the policy's loss."""
    get = arguments.get
    low = get(f"{ACTOR}.clip_ratio_low") or get(f"{ACTOR}.clip_ratio")
    high = get(f"{ACTOR}.clip_ratio_high") or get(f"{ACTOR}.clip_ratio")
    loss: dict[str, Any] = {"dual_clip": get(f"{ACTOR}.clip_ratio_c")}
    if low != 0.2:
        loss["clip_eps"] = low
    if high != low:
        loss["clip_eps_high"] = high
    if entropy := get(f"{ACTOR}.entropy_coeff"):
        loss["entropy_coef"] = entropy
    kl_type, mode = get(f"{ACTOR}.kl_loss_type"), get(f"{ACTOR}.loss_agg_mode")
    coefficient = get(f"{ACTOR}.kl_loss_coef")
    if get(f"{ACTOR}.use_kl_loss"):
        loss["kl_coef"] = coefficient
        estimator = KL_ESTIMATORS.get(kl_type)
        if estimator is None:
            remarks[f"{ACTOR}.kl_loss_type={kl_type}"] = "not supported; k3 is used"
        elif estimator != "k3":
            loss["kl_estimator"] = estimator
    if mode not in AGGREGATIONS:
        remarks[f"{ACTOR}.loss_agg_mode={mode}"] = "aggregation: constant, with a constant_length"
    elif mode != "token-mean":
        loss["aggregation"] = AGGREGATIONS[mode]
    return loss


def _data(arguments: _Arguments, remarks: dict[str, str]) -> dict[str, Any]:
    get = arguments.get
    train, evaluated = str(get("data.train_files") or "train.parquet"), str(get("data.val_files") or "")
    data: dict[str, Any] = {"source": train}
    if Path(train).name == "train.parquet" and evaluated == str(Path(train).with_name("test.parquet")):
        # A folder with a file for each split.
        data = {"source": str(Path(train).parent), "eval_split": "test"}
    elif evaluated:
        remarks[f"data.val_files={evaluated}"] = "put both files into one folder, as train.parquet and test.parquet"
    if "$" in data["source"]:
        remarks["data.source"] = "has a variable of the shell; write the path"
    if (column := get("data.prompt_key")) != "prompt":
        data["columns"] = {"prompt": column}
    remarks["the column answer"] = "verl's rows have it in reward_model.ground_truth; give it a column of its own"
    data |= {"batch_size": get("data.train_batch_size"), "max_prompt_tokens": get("data.max_prompt_length")}
    if get("data.filter_overlong_prompts"):
        data["overlong"] = "drop"
        get("data.truncation")
    elif (truncation := get("data.truncation")) != "error":
        if truncation not in OVERLONG:
            remarks[f"data.truncation={truncation}"] = "not supported; prompts lose their beginning"
        data["overlong"] = "truncate_left"
    return data


def _recipe_text(content: Mapping[str, Any], card: str | None) -> str:
    """Return the recipe with a line for each role, node and option."""
    lines = ["# @package _global_"]
    if card is not None:
        lines += ["defaults:", f"  - /model@models.policy: {card}", "  - _self_"]
    for name, value in content.items():
        if not isinstance(value, Mapping) or len(value) < 3:
            lines.append(f"{name}: {_flow(value)}")
        else:
            lines += [f"{name}:", *(f"  {key}: {_flow(inner)}" for key, inner in value.items())]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")
