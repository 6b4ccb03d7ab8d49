"""The graph of a recipe for a script of verl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.commands.convert.verl_arguments import ACTOR, KL_ESTIMATORS, ROLLOUT, Arguments
from rlflow.commands.convert.verl_loss import loss_of
from rlflow.commands.convert.verl_roles import has_adapters, has_reference, reward_model_of
from rlflow.errors import RecipeError
from rlflow.nodes.base import KINDS

# The names in versions of verl, from the oldest to 0.9.
_OVERLONG_BUFFER = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)

# The node for each of verl's estimators of advantages.
_NODES: Mapping[str, str] = {
    "grpo": "group_advantage",
    "grpo_vectorized": "group_advantage",
    "gae": "gae_advantage",
    "rloo": "leave_one_out_advantage",
    "rloo_vectorized": "leave_one_out_advantage",
    "remax": "greedy_advantage",
    "reinforce_plus_plus": "token_advantage",
    "reinforce_plus_plus_baseline": "batch_advantage",
}
# Older versions of verl have these at the top level.
_FUNCTION = ("reward.custom_reward_function", "custom_reward_function")
_MANAGER = ("reward.reward_manager.name", "reward_model.reward_manager", "reward_manager.name", "reward.reward_manager")
_DEFAULT = "verl chooses the reward by a row's data_source; rlflow compares numbers"


def advantage_of(arguments: Arguments) -> str:
    """Return the node of the script's estimator of advantages. Raises RecipeError for one without a node."""
    estimator = arguments.get("algorithm.adv_estimator")
    if estimator not in _NODES:
        fix = "algorithm: NAME in a recipe of your own; see docs/algorithms.md"
        raise RecipeError("algorithm.adv_estimator", f"'{estimator}' is not converted", known=_NODES, fix=fix)
    return _NODES[estimator]


def graph_of(arguments: Arguments) -> dict[str, Any]:
    """Return the nodes of the script's algorithm with their options."""
    get, advantage = arguments.get, advantage_of(arguments)
    # Search-R1 and its forks call the size of a group n_agent.
    group_size = get(f"{ROLLOUT}.n") * get(f"{ROLLOUT}.n_agent")
    is_filtered = get("algorithm.filter_groups.enable")
    if group_size == 1 and (KINDS[advantage].compares_groups or is_filtered):
        reader = "algorithm.filter_groups" if is_filtered else get("algorithm.adv_estimator")
        fact = f"is 1, and {reader} compares the responses to a prompt; verl's advantage is then the reward itself"
        raise RecipeError(f"{ROLLOUT}.n", fact, fix=f"{ROLLOUT}.n=8 in the script, or any number from 2")
    rollouts = {"node": "generate", "role": "rollout", "group_size": group_size}
    rollouts["max_tokens"] = get("data.max_response_length")
    rollouts |= {name: get(f"{ROLLOUT}.{name}") for name in ("temperature", "top_p") if get(f"{ROLLOUT}.{name}") != 1}
    graph: dict[str, Any] = {"rollouts": rollouts}
    if not get("algorithm.rollout_correction.bypass_mode"):
        graph["old_logprobs"] = {"node": "logprobs", "role": "actor"}
    graph["rewards"] = rewards_of(arguments)
    if has_reference(arguments):
        # With adapters, verl's reference is the actor without them.
        reference = {"node": "logprobs", "role": "reference"}
        graph["reference"] = {"node": "base_logprobs", "role": "actor"} if has_adapters(arguments) else reference
    minibatches = _minibatches(arguments, ACTOR)
    num_epochs = get(f"{ACTOR}.ppo_epochs")
    epochs = {"num_epochs": num_epochs} if num_epochs != 1 else {}
    graph |= _advantages(arguments, advantage, graph["rewards"])
    graph["update"] = {**loss_of(arguments), **epochs}
    graph["update"] |= {"num_minibatches": minibatches} if minibatches > 1 else {}
    if warmup := get("trainer.critic_warmup"):
        if "value_update" in graph:
            graph["update"]["critic_warmup"] = warmup
        else:
            arguments.note(f"trainer.critic_warmup={warmup}", "there is no critic, and the first steps train, too")
    return graph


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
    if not arguments.get("algorithm.use_kl_in_reward"):
        return {}, {}
    coefficient, kind = (arguments.get(f"algorithm.{key}") for key in ("kl_ctrl.kl_coef", "kl_penalty"))
    estimator = KL_ESTIMATORS.get(kind)
    if estimator is None:
        arguments.note(f"algorithm.kl_penalty={kind}", "not supported; k1 is used")
    return {"kl_coef": float(coefficient)}, {"kl_estimator": estimator} if estimator in ("k2", "k3") else {}


def _critic(arguments: Arguments, rewards: Mapping[str, str]) -> dict[str, Any]:
    """Return the nodes of PPO between the rewards and the update of the policy."""
    get = arguments.get
    advantages = {"node": "gae_advantage", "gamma": get("algorithm.gamma"), "lam": get("algorithm.lam"), **rewards}
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


def _advantages(arguments: Arguments, advantage: str, rewards_node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes between the rewards and the update of the policy."""
    get = arguments.get
    nodes, rewards = _shaped_rewards(arguments)
    if advantage == "gae_advantage":
        return nodes | _critic(arguments, rewards)
    coefficient, kl_estimator = _kl_in_reward(arguments)
    if advantage == "token_advantage":
        if (gamma := get("algorithm.gamma")) != 1:
            arguments.note(f"algorithm.gamma={gamma}", "not supported; rewards are not discounted")
        return nodes | {"advantages": {"node": advantage, **rewards, **coefficient, **kl_estimator, "unbiased": True}}
    if coefficient:
        nodes["kl"] = {"node": "kl_divergence", **kl_estimator}
        nodes["penalized"] = {"node": "kl_penalty", **rewards, **coefficient}
        rewards = {"rewards": "penalized"}
    if advantage == "greedy_advantage":
        greedy = {"node": "generate", "role": "rollout", "group_size": 1, "temperature": 0}
        nodes["greedy"] = {**greedy, "max_tokens": get("data.max_response_length")}
        same = {
            name: f"${{graph.rewards.{name}}}" for name in ("role", "function", "functions") if name in rewards_node
        }
        nodes["greedy_rewards"] = {"node": rewards_node["node"], "rollouts": "greedy", **same}
        if coefficient:
            key = "algorithm.use_kl_in_reward=True"
            arguments.note(key, "every token has the penalty of its whole response, and not that from the token on")
    options: dict[str, Any] = {}
    if advantage == "batch_advantage":
        options = {"unbiased": True}
    elif advantage == "group_advantage":
        options = {"epsilon": 1e-6, **({} if get("algorithm.norm_adv_by_std_in_grpo") else {"normalize": False})}
    return nodes | {"advantages": {"node": advantage, **options, **rewards}}


def _shaped_rewards(arguments: Arguments) -> tuple[dict[str, Any], dict[str, str]]:
    """Return DAPO's nodes for the rewards, and the input of the nodes after them."""
    get = arguments.get
    nodes: dict[str, Any] = {}
    rewards: dict[str, str] = {}
    if get("algorithm.filter_groups.enable"):
        # Zero is no limit in verl, and 10 is rlflow's default.
        rounds = get("algorithm.filter_groups.max_num_gen_batches") or 10
        nodes["sampling"] = {"node": "dynamic_sampling", **({"max_rounds": rounds} if rounds != 10 else {})}
    for buffer in _OVERLONG_BUFFER:
        if not get(f"{buffer}.enable"):
            continue
        if not get(f"{buffer}.len"):
            raise RecipeError(f"{buffer}.len", "is missing", fix="the tokens over which the penalty rises")
        shaped = {"node": "overlong_penalty", "max_tokens": get("data.max_response_length")}
        nodes["shaped"] = {**shaped, "buffer_tokens": get(f"{buffer}.len")}
        rewards = {"rewards": "shaped"}
        if (factor := get(f"{buffer}.penalty_factor")) not in (None, 1):
            arguments.note(f"{buffer}.penalty_factor={factor}", "the penalty rises to 1; scale the reward instead")
    return nodes, rewards


def rewards_of(arguments: Arguments) -> dict[str, Any]:
    """Return the node of the rewards: a reward model, the script's own function, or numbers that are compared."""
    if reward_model_of(arguments):
        remark = "must have the policy's tokenizer: a reward model of rlflow scores the policy's tokens"
        arguments.note("models.reward", remark)
        return {"node": "reward_model", "role": "reward"}
    path, name = (arguments.first(*(f"{key}.{part}" for key in _FUNCTION)) for part in ("path", "name"))
    if not path:
        arguments.note("graph.rewards.function", _DEFAULT)
        return {"node": "reward", "function": "number"}
    term = _term(arguments, str(path), str(name or "compute_score"))
    file, name = Path(str(path)), str(name or "compute_score")
    if file.is_file():
        remark = f"verl calls {path}:{name}. That file's folder must be on PYTHONPATH"
        arguments.note("graph.rewards.functions", remark)
        return {"node": "reward", "functions": {name: term}}
    shown = ", ".join(f"{key}: {_quoted(value)}" for key, value in term.items())
    fact = f"verl calls {path}:{name}; rlflow compares numbers. With that file's folder on PYTHONPATH, write "
    arguments.note("graph.rewards.function", f"{fact}functions: {{{name}: {{{shown}}}}} in its place")
    return {"node": "reward", "function": "number"}


def _term(arguments: Arguments, path: str, name: str) -> dict[str, Any]:
    """Return the script's function as a term of a reward."""
    style = "verl_batch" if arguments.first(*_MANAGER) == "batch" else "verl"
    term: dict[str, Any] = {"function": f"{Path(path).stem}:{name}", "style": style}
    options = {}
    for key in arguments.values:
        beginning, _, option = key.rpartition(".reward_kwargs.")
        if beginning in _FUNCTION:
            options[option] = arguments.get(key)
    return term | ({"options": options} if options else {})


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) and ":" in value else str(value)
