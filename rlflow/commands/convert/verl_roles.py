"""The models and roles of a recipe for a script of verl."""

import re
from collections.abc import Mapping
from typing import Any

from rlflow.commands.convert.verl_arguments import ACTOR, Arguments
from rlflow.errors import RecipeError
from rlflow.recipe.compose import CONF
from rlflow.resources.models.config import find_config

_MODEL = "actor_rollout_ref.model"
# Versions of verl have the number of positions in these places.
_POSITIONS = (
    f"{_MODEL}.override_config.max_position_embeddings",
    f"{_MODEL}.override_config.model_config.max_position_embeddings",
)
# Names of models with the sizes of others, as regular expressions.
_SAME_SIZES: Mapping[str, str] = {
    # Qwen2 and Qwen2.5-Coder have the sizes of Qwen2.5.
    r"qwen-?2(\.5)?[-_](coder-)?(?=[\d.]+b|math)": "qwen2.5-",
    r"llama-?(3(\.\d)?)-": r"llama-\1-",
}
# Endings of names of models that share their sizes.
_VARIANT = re.compile(r"-(instruct|base|it|chat|hf)$", re.IGNORECASE)


def model_card(name: str, path: str, models: dict[str, Any], arguments: Arguments) -> str | None:
    """Return the name in conf/model of the model at this path; None if it has none, or a config.json on this machine.

    Adds the path to ``models`` unless the card is that of the very model.
    """
    cards = {
        file.stem: card[1]
        for file in sorted((CONF / "model").glob("*.yaml"))
        if (card := re.search(r"^architecture_of: (.+)$", file.read_text(), re.MULTILINE))
    }
    if exact := next((stem for stem, model in cards.items() if model == path), None):
        models[name] = _overrides(name, arguments)
        return exact
    if "$" in path:
        arguments.note(f"models.{name}.path", "has a variable of the shell; write the path")
    models[name] = {"path": path}
    if find_config(path) is not None:
        return None
    similar = _similar(path, cards)
    if similar is None:
        remark = f"needs the config.json in that folder, or models.{name}.architecture"
        arguments.remarks.setdefault(f"models.{name}.path", remark)
        return None
    models[name] |= {"architecture_of": path, **(_overrides(name, arguments) or _positions(name, similar, arguments))}
    remark = f"taken to be that of {cards[similar]}; the run compares it with the model's own"
    arguments.note(f"models.{name}.architecture", remark)
    return similar


def _similar(path: str, cards: Mapping[str, str]) -> str | None:
    """Return the card whose model has the sizes of the one at this path, as far as names say."""
    path = path.lower()
    for pattern, replacement in _SAME_SIZES.items():
        path = re.sub(pattern, replacement, path)
    names = {stem: _VARIANT.sub("", model.rpartition("/")[2]).lower() for stem, model in cards.items()}
    fitting = [
        stem for stem, name in names.items() if re.search(rf"(?<![a-z0-9.]){re.escape(name)}(?![a-z0-9.])", path)
    ]
    return max(fitting, key=lambda stem: len(names[stem]), default=None)


def _overrides(name: str, arguments: Arguments) -> dict[str, Any]:
    """Return what the script changes about the sizes of the policy."""
    for key in _POSITIONS if name == "policy" else ():
        if isinstance(positions := arguments.values.get(key), int):
            arguments.note(f"{key}={positions}", "must be in the config.json of the model, too, before the run")
            arguments.used.add(key)
            return {"architecture": {"max_position_embeddings": positions}}
    return {}


def _positions(name: str, card: str, arguments: Arguments) -> dict[str, Any]:
    """Return as many positions as the script needs, where the policy comes from a model with fewer."""
    needed = sum(arguments.get(f"data.max_{part}_length") for part in ("prompt", "response"))
    known = re.search(
        r"^ *max_position_embeddings: (\d+)$", (CONF / "model" / f"{card}.yaml").read_text(), re.MULTILINE
    )
    if name != "policy" or known is None or needed <= int(known[1]):
        return {}
    key = f"models.{name}.architecture.max_position_embeddings"
    arguments.note(key, f"{needed} as the script needs, and must be in the config.json of the model")
    return {"architecture": {"max_position_embeddings": needed}}


def has_reference(arguments: Arguments) -> bool:
    """Return whether the script compares the policy with the model as it was."""
    return bool(arguments.get(f"{ACTOR}.use_kl_loss") or arguments.get("algorithm.use_kl_in_reward"))


def has_adapters(arguments: Arguments) -> bool:
    """Return whether only adapters of the policy are trained."""
    return bool(_rank(arguments))


def reward_model_of(arguments: Arguments) -> str | None:
    """Return the path of the script's reward model; None without one, or where a function of the script asks it."""
    get = arguments.get
    beginning = next((key for key in ("reward_model", "reward.reward_model") if get(f"{key}.enable")), None)
    if beginning is None:
        return None
    has_function = arguments.first("reward.custom_reward_function.path", "custom_reward_function.path")
    # From version 0.6 on, a reward model that has an engine of its own generates what a function reads.
    if has_function and any(
        re.match(r"(reward\.)?reward_model\.(rollout|reward_models)\.", key) for key in arguments.values
    ):
        remark = "the script's reward function asks this model: serve it yourself, for a function that calls it"
        arguments.note(f"{beginning}.enable=True", remark)
        return None
    path = arguments.first("reward.reward_model.model_path", "reward_model.model.path")
    return str(path or "~/models/FsfairX-LLaMA3-RM-v0.1")


def roles_of(arguments: Arguments, steps: int, models: Mapping[str, str]) -> dict[str, Any]:
    """Return the roles, the trained ones with their optimizers."""
    actor: dict[str, Any] = {
        **{"model": "policy", "engine": "deepspeed"},
        "optimizer": _optimizer(arguments, ACTOR, steps),
    }
    roles = {"actor": actor | _adapters(arguments)}
    roles["rollout"] = {"model": "policy", "engine": "vllm", "follows": "actor"}
    if arguments.is_one_step_off:
        roles["rollout"]["colocate"] = []
    if arguments.get("algorithm.adv_estimator") == "gae":
        optimizer, model = _optimizer(arguments, "critic", steps), "critic" if "critic" in models else "policy"
        roles["critic"] = {"model": model, "engine": "deepspeed", "optimizer": optimizer}
        if rank := arguments.get("critic.model.lora_rank"):
            arguments.note(f"critic.model.lora_rank={rank}", "not supported: all weights of the critic are trained")
    if has_reference(arguments) and not has_adapters(arguments):
        roles["reference"] = {"model": "reference" if "reference" in models else "policy", "engine": "deepspeed"}
    if "reward" in models:
        roles["reward"] = {"model": "reward", "engine": "deepspeed"}
    return roles


def _rank(arguments: Arguments) -> Any:
    return arguments.get(f"{_MODEL}.lora_rank") or arguments.get(f"{_MODEL}.lora.rank")


def _adapters(arguments: Arguments) -> dict[str, Any]:
    """Return the option for adapters, by the names of FSDP or of Megatron; nothing without adapters."""
    get, rank = arguments.get, _rank(arguments)
    for key in (f"{_MODEL}.lora_adapter_path", f"{_MODEL}.lora.adapter_path"):
        if adapter := get(key):
            fact = f"'{adapter}' is an adapter to continue, and rlflow starts adapters anew"
            fix = f"merge it into the model, write the path of that model and {_MODEL}.lora_rank"
            if not rank:
                raise RecipeError(key, fact, fix=fix)
            arguments.note(f"{key}={adapter}", f"{fact}: merge it into the model, and write the path of that model")
    if not rank:
        return {}
    is_megatron = not get(f"{_MODEL}.lora_rank")
    alpha = get(f"{_MODEL}.lora.alpha") or 32 if is_megatron else get(f"{_MODEL}.lora_alpha")
    adapters = {"rank": rank, "alpha": float(alpha)}
    # The layers of Megatron have names of their own; by default these are all linear layers.
    targets = None if is_megatron else get(f"{_MODEL}.target_modules")
    if targets not in ("all-linear", None):
        adapters["target_modules"] = targets if isinstance(targets, list) else [targets]
    experts = "experts" in str(get(f"{_MODEL}.target_parameters"))
    if get(f"{_MODEL}.lora.merge") or experts:  # engines get adapters of experts only merged
        adapters["merge"] = True
    if experts:
        adapters["experts"] = True
    return {"lora": adapters}


def _optimizer(arguments: Arguments, of: str, steps: int) -> dict[str, Any]:
    """Return the options of the optimizer of verl's ``of``."""
    get = arguments.get
    warmup, share = get(f"{of}.optim.lr_warmup_steps") or 0, get(f"{of}.optim.lr_warmup_steps_ratio")
    if warmup <= 0 and share:
        warmup = int(share * steps)
        if "steps" in arguments.remarks:
            arguments.note(
                f"{of}.optim.lr_warmup_steps_ratio={share}", f"warmup_steps: {share} of the steps; {warmup} is a guess"
            )
    # Older versions of verl call it warmup_style, and Megatron lr_decay_style.
    names = [f"{of}.optim.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    schedule = arguments.first(*names) or "constant"
    if schedule not in ("constant", "cosine", "linear"):
        arguments.note(f"{of}.optim.lr_scheduler_type={schedule}", "not supported; the learning rate is constant")
        schedule = "constant"
    clip = get(f"{of}.optim.clip_grad")
    options = {
        "learning_rate": float(get(f"{of}.optim.lr")),
        "schedule": schedule,
        "warmup_steps": max(0, warmup),
        "betas": get(f"{of}.optim.betas"),
        "weight_decay": get(f"{of}.optim.weight_decay"),
        "max_grad_norm": get(f"{of}.grad_clip") if clip is None else clip,
    }
    usual = {"schedule": "constant", "warmup_steps": 0, "max_grad_norm": 1.0, "betas": None}
    return {name: value for name, value in options.items() if value != usual.get(name)}
