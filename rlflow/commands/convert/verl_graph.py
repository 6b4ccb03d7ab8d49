"""The graph of a recipe for a script of verl."""

from pathlib import Path
from typing import Any

from rlflow.commands.convert.verl_arguments import ACTOR, AGGREGATIONS, KL_ESTIMATORS, ROLLOUT, Arguments
from rlflow.errors import RecipeError

# The names in versions of verl, from the oldest to 0.9.
_OVERLONG_BUFFER = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)

ESTIMATORS = ("grpo", "gae", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""verl's estimators of advantages that have a node."""


def has_reference(arguments: Arguments) -> bool:
    """Return whether the script compares the policy with the model as it was."""
    return bool(arguments.get(f"{ACTOR}.use_kl_loss") or arguments.get("algorithm.use_kl_in_reward"))


def graph_of(arguments: Arguments) -> dict[str, Any]:
    """Return the nodes of the script's algorithm with their options."""
    get = arguments.get
    rollouts = {"node": "generate", "role": "rollout", "group_size": get(f"{ROLLOUT}.n")}
    rollouts["max_tokens"] = get("data.max_response_length")
    rollouts |= {name: get(f"{ROLLOUT}.{name}") for name in ("temperature", "top_p") if get(f"{ROLLOUT}.{name}") != 1}
    graph: dict[str, Any] = {
        "rollouts": rollouts,
        "old_logprobs": {"node": "logprobs", "role": "actor"},
        "rewards": {"node": "reward", "function": "number"},
    }
    _note_reward(arguments)
    if has_reference(arguments):
        graph["reference"] = {"node": "logprobs", "role": "reference"}
    minibatches = _minibatches(arguments, ACTOR)
    num_epochs = get(f"{ACTOR}.ppo_epochs")
    epochs = {"num_epochs": num_epochs} if num_epochs != 1 else {}
    graph |= _advantages(arguments)
    graph["update"] = {**_loss(arguments), **epochs}
    graph["update"] |= {"num_minibatches": minibatches} if minibatches > 1 else {}
    if warmup := get("trainer.critic_warmup"):
        graph["update"]["critic_warmup"] = warmup
    return graph


def _note_reward(arguments: Arguments) -> None:
    get = arguments.get
    # Older versions of verl have this at the top level.
    path, name = (
        get(f"reward.custom_reward_function.{key}") or get(f"custom_reward_function.{key}") for key in ("path", "name")
    )
    if not path:
        fact = "verl chooses the reward by a row's data_source; rlflow compares numbers"
    else:
        name = name or "compute_score"
        term = f'{{{name}: {{function: "{Path(path).stem}:{name}", style: verl}}}}'
        fact = f"verl calls {path}:{name}; rlflow compares numbers. With that file's folder on PYTHONPATH, write "
        fact += f"functions: {term} in its place"
    arguments.note("graph.rewards.function", fact)


def _minibatches(arguments: Arguments, of: str) -> int:
    """Return the number of optimizer steps of verl's ``of`` in an epoch."""
    batch, size = arguments.get("data.train_batch_size"), arguments.get(f"{of}.ppo_mini_batch_size")
    if size is None:
        size = arguments.get(f"{ACTOR}.ppo_mini_batch_size")
    number: int = max(1, round(batch / size))
    if number * size != batch and number > 1:
        arguments.note(
            f"{of}.ppo_mini_batch_size={size}", f"{number} minibatches of about equally many of {batch} prompts"
        )
    return number


def _kl_in_reward(arguments: Arguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the coefficient of a penalty for KL in the reward, and its estimator; nothing without one."""
    coefficient, kind = (arguments.get(f"algorithm.{key}") for key in ("kl_ctrl.kl_coef", "kl_penalty"))
    if not arguments.get("algorithm.use_kl_in_reward"):
        return {}, {}
    estimator = KL_ESTIMATORS.get(kind)
    if estimator is None:
        arguments.note(f"algorithm.kl_penalty={kind}", "not supported; k1 is used")
    return {"kl_coef": float(coefficient)}, {"kl_estimator": estimator} if estimator in ("k2", "k3") else {}


def _critic(arguments: Arguments) -> dict[str, Any]:
    """Return the nodes of PPO between the rewards and the update of the policy."""
    get = arguments.get
    advantages = {"node": "gae_advantage", "gamma": get("algorithm.gamma"), "lam": get("algorithm.lam")}
    coefficient, estimator = _kl_in_reward(arguments)
    advantages |= {**coefficient, **estimator, "unbiased": True}
    critic = {"clip_eps": get("critic.cliprange_value")}
    critic["num_minibatches"] = _minibatches(arguments, "critic")
    num_epochs = get("critic.ppo_epochs") or get(f"{ACTOR}.ppo_epochs")
    critic |= {"num_epochs": num_epochs} if num_epochs != 1 else {}
    return {
        "values": {"node": "values", "role": "critic"},
        "advantages": advantages,
        "value_update": {"node": "value_update", "role": "critic", **critic},
    }


def _advantages(arguments: Arguments) -> dict[str, Any]:
    """Return the nodes between the rewards and the update of the policy."""
    get = arguments.get
    estimator = get("algorithm.adv_estimator")
    if estimator == "gae":
        return _critic(arguments)
    nodes, rewards = _shaped_rewards(arguments)
    coefficient, kl_estimator = _kl_in_reward(arguments)
    if estimator == "reinforce_plus_plus":
        if (gamma := get("algorithm.gamma")) != 1:
            arguments.note(f"algorithm.gamma={gamma}", "not supported; rewards are not discounted")
        return nodes | {
            "advantages": {"node": "token_advantage", **rewards, **coefficient, **kl_estimator, "unbiased": True}
        }
    if coefficient:
        nodes["kl"] = {"node": "kl_divergence", **kl_estimator}
        nodes["penalized"] = {"node": "kl_penalty", **rewards, **coefficient}
        rewards = {"rewards": "penalized"}
    if estimator == "remax":
        greedy = {"node": "generate", "role": "rollout", "group_size": 1, "temperature": 0}
        nodes["greedy"] = {**greedy, "max_tokens": get("data.max_response_length")}
        of_greedy = {"node": "reward", "rollouts": "greedy", "function": "${graph.rewards.function}"}
        nodes["greedy_rewards"] = of_greedy
        if coefficient:
            key = "algorithm.use_kl_in_reward=True"
            arguments.note(key, "every token has the penalty of its whole response, and not that from the token on")
    return nodes | {"advantages": {**_advantage_node(arguments), **rewards}}


def _advantage_node(arguments: Arguments) -> dict[str, Any]:
    """Return the node for an estimator that gives all tokens of a response the same advantage."""
    estimator = arguments.get("algorithm.adv_estimator")
    if estimator == "rloo":
        return {"node": "leave_one_out_advantage"}
    if estimator == "remax":
        return {"node": "greedy_advantage"}
    if estimator == "reinforce_plus_plus_baseline":
        return {"node": "batch_advantage", "unbiased": True}
    normalize = {} if arguments.get("algorithm.norm_adv_by_std_in_grpo") else {"normalize": False}
    return {"node": "group_advantage", "epsilon": 1e-6, **normalize}


def _shaped_rewards(arguments: Arguments) -> tuple[dict[str, Any], dict[str, str]]:
    """Return DAPO's nodes for the rewards, and the input of the nodes after them."""
    get = arguments.get
    nodes: dict[str, Any] = {}
    rewards: dict[str, str] = {}
    if get("algorithm.filter_groups.enable"):
        nodes["sampling"] = {"node": "dynamic_sampling"}
    for buffer in _OVERLONG_BUFFER:
        if not get(f"{buffer}.enable"):
            continue
        shaped = {"node": "overlong_penalty", "max_tokens": get("data.max_response_length")}
        nodes["shaped"] = {**shaped, "buffer_tokens": get(f"{buffer}.len")}
        rewards = {"rewards": "shaped"}
        if (factor := get(f"{buffer}.penalty_factor")) not in (None, 1):
            arguments.note(f"{buffer}.penalty_factor={factor}", "the penalty rises to 1; scale the reward instead")
    return nodes, rewards


def _loss(arguments: Arguments) -> dict[str, Any]:
    """Return the policy's update with the options of its loss."""
    get = arguments.get
    kind = get(f"{ACTOR}.policy_loss.loss_mode")
    if kind not in ("vanilla", "gspo"):
        key = f"{ACTOR}.policy_loss.loss_mode"
        fix = "a recipe of your own; see docs/algorithms.md"
        raise RecipeError(key, f"'{kind}' is not converted", known=["vanilla", "gspo"], fix=fix)
    loss: dict[str, Any] = {"node": "gspo_update" if kind == "gspo" else "policy_update", "role": "actor"}
    # With GSPO, verl has no dual clip.
    dual_clip = get(f"{ACTOR}.clip_ratio_c")
    loss |= {"dual_clip": dual_clip} if kind == "vanilla" else {}
    # Null is not the default, so clip_ratio counts only where a script sets the others to null.
    low, high = (get(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    both = get(f"{ACTOR}.clip_ratio")
    if f"{ACTOR}.clip_ratio" in arguments.values and None not in (low, high):
        arguments.note(f"{ACTOR}.clip_ratio={both}", "verl does not use it: clip_ratio_low and clip_ratio_high count")
    low, high = (both if side is None else side for side in (low, high))
    if low != 0.2 or kind == "gspo":
        loss["clip_eps"] = low
    if high != low or kind == "gspo":
        loss["clip_eps_high"] = high
    if entropy := get(f"{ACTOR}.entropy_coeff"):
        loss["entropy_coef"] = entropy
    loss |= _kl_in_loss(arguments) | _aggregation(arguments)
    level = get("algorithm.rollout_correction.rollout_is")
    bound = get("algorithm.rollout_correction.rollout_is_threshold")
    if level in ("token", "sequence"):
        loss["correction"] = {"level": level, "max_ratio": bound}
    elif level:
        arguments.note(f"algorithm.rollout_correction.rollout_is={level}", "not supported; there is no correction")
    return loss


def _kl_in_loss(arguments: Arguments) -> dict[str, Any]:
    get = arguments.get
    coefficient, kl_type = get(f"{ACTOR}.kl_loss_coef"), get(f"{ACTOR}.kl_loss_type")
    if not get(f"{ACTOR}.use_kl_loss"):
        return {}
    estimator = KL_ESTIMATORS.get(kl_type)
    if estimator is None:
        arguments.note(f"{ACTOR}.kl_loss_type={kl_type}", "not supported; k3 is used")
    return {"kl_coef": coefficient, **({"kl_estimator": estimator} if estimator in ("k1", "k2") else {})}


def _aggregation(arguments: Arguments) -> dict[str, Any]:
    """Return the weights of tokens, where they are not those of the node's default."""
    get = arguments.get
    mode, kind = get(f"{ACTOR}.loss_agg_mode"), get(f"{ACTOR}.policy_loss.loss_mode")
    length, limit = get(f"{ACTOR}.loss_scale_factor"), get("data.max_response_length")
    if mode == "seq-mean-token-sum-norm":
        return {"aggregation": "constant", "constant_length": length or limit}
    if mode == "seq-mean-token-sum":
        return {"aggregation": "constant", "constant_length": 1}
    if mode not in AGGREGATIONS:
        arguments.note(f"{ACTOR}.loss_agg_mode={mode}", "not supported; every token has the same weight")
    aggregation = AGGREGATIONS.get(mode, "token")
    return {"aggregation": aggregation} if aggregation != {"gspo": "sequence"}.get(kind, "token") else {}
