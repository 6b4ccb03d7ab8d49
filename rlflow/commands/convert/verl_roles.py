"""The models and roles of a recipe for a script of verl."""

import re
from pathlib import Path
from typing import Any

from rlflow.commands.convert.verl_arguments import ACTOR, Arguments
from rlflow.commands.convert.verl_graph import has_reference
from rlflow.recipe.compose import CONF

# Endings of names of models that share their sizes.
_VARIANT = re.compile(r"-(instruct|base|it|chat|hf)$", re.IGNORECASE)


def model_card(name: str, path: str, models: dict[str, Any], arguments: Arguments) -> str | None:
    """Return the name in conf/model of the model at this path; None if it has none.

    Adds the path to ``models`` if the card is that of a variant, or if there is none.
    """
    if "$" in path:
        arguments.note(f"models.{name}.path", "has a variable of the shell; write the path")
    variant = _VARIANT.sub("", Path(path).name).lower()
    similar = None
    for file in sorted((CONF / "model").glob("*.yaml")):
        card = re.search(r"^architecture_of: (.+)$", file.read_text(), re.MULTILINE)
        if card and card[1] == path:
            return file.stem
        if card and _VARIANT.sub("", card[1].rpartition("/")[2]).lower() == variant:
            similar = file.stem, card[1]
    if similar is None:
        models[name] = {"path": path}
        arguments.remarks.setdefault(
            f"models.{name}.path", f"needs the config.json in that folder, or models.{name}.architecture"
        )
        return None
    models[name] = {"path": path, "architecture_of": path}
    arguments.note(
        f"models.{name}.architecture", f"taken to be that of {similar[1]}; the run compares it with the model's own"
    )
    return similar[0]


def roles_of(arguments: Arguments, steps: int, *, critic: str) -> dict[str, Any]:
    """Return the roles, the trained ones with their optimizers. The critic is made of the model ``critic``."""
    actor: dict[str, Any] = {
        **{"model": "policy", "engine": "deepspeed"},
        "optimizer": _optimizer(arguments, ACTOR, steps),
    }
    get = arguments.get
    rank, alpha = get("actor_rollout_ref.model.lora_rank"), get("actor_rollout_ref.model.lora_alpha")
    targets = get("actor_rollout_ref.model.target_modules")
    if rank:
        actor["lora"] = {"rank": rank, "alpha": float(alpha)}
        if targets != "all-linear":
            actor["lora"]["target_modules"] = targets
    roles = {"actor": actor, "rollout": {"model": "policy", "engine": "vllm", "follows": "actor"}}
    if get("algorithm.adv_estimator") == "gae":
        optimizer = _optimizer(arguments, "critic", steps)
        roles["critic"] = {"model": critic, "engine": "deepspeed", "optimizer": optimizer}
    if has_reference(arguments):
        roles["reference"] = {"model": "policy", "engine": "deepspeed"}
    return roles


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
    # Older versions of verl call it warmup_style.
    schedule = get(f"{of}.optim.lr_scheduler_type") or get(f"{of}.optim.warmup_style") or "constant"
    if schedule not in ("constant", "cosine"):
        arguments.note(f"{of}.optim.lr_scheduler_type={schedule}", "not supported; the learning rate is constant")
        schedule = "constant"
    clip = get(f"{of}.optim.clip_grad")
    options = {
        "learning_rate": float(get(f"{of}.optim.lr")),
        "schedule": schedule,
        "warmup_steps": max(0, warmup),
        "weight_decay": get(f"{of}.optim.weight_decay"),
        "max_grad_norm": get(f"{of}.grad_clip") if clip is None else clip,
    }
    usual = {"schedule": "constant", "warmup_steps": 0, "max_grad_norm": 1.0}
    return {name: value for name, value in options.items() if value != usual.get(name)}
