"""Scripts of verl as recipes.

A recipe trains as its script does with verl's defaults; how it is laid out on GPUs is left to the planner. Every
argument has a place in the recipe, or a remark that says why it has none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlflow.commands.convert.arguments import read_arguments
from rlflow.commands.convert.verl_arguments import ACTOR, Arguments, from_home
from rlflow.commands.convert.verl_data import data_of
from rlflow.commands.convert.verl_graph import graph_of
from rlflow.commands.convert.verl_remarks import reason_without_place
from rlflow.commands.convert.verl_roles import has_adapters, has_reference, model_card, reward_model_of, roles_of
from rlflow.errors import RecipeError

# Arguments that only versions of verl before 0.3 have.
_OLD = re.compile(
    r"data\.(train|val)_data_num|.*\.(n_agent|grad_offload|ppo_micro_batch_size|log_prob_micro_batch_size)"
)
_IMAGES = re.compile(r"[-_.]?(VL|Omni|Vision|InternVL.*|llava.*)\b", re.IGNORECASE)
# Models of images that rlflow trains, in the form of transformers.
_SUPPORTED = re.compile(r"qwen2\.5-?vl|qwen3-?vl(?!.*-a\d+b)|internvl.*-hf", re.IGNORECASE)


@dataclass(frozen=True)
class Converted:
    """A recipe made of a script."""

    recipe: str
    """The text of the recipe."""
    cluster: str
    """The shape of the script's cluster, for ``cluster=``."""
    remarks: Mapping[str, str]
    """For each argument without a place in the recipe, why; and what a person must check."""


def convert(script: str) -> Converted:
    """Convert the text of a script. Raises RecipeError for a script of an algorithm without nodes."""
    arguments = read_arguments(script)
    get = arguments.get
    model = str(get("actor_rollout_ref.model.path") or "")
    if not model:
        unknown = next(
            (word for word in arguments.remarks if word.startswith("$") and "is only" in arguments.remarks[word]), ""
        )
        fact = f"is missing; {unknown} is only known when the script runs" if unknown else "is missing"
        raise RecipeError("actor_rollout_ref.model.path", fact, fix="the arguments of verl.trainer.main_ppo")
    if get("trainer.val_only"):
        raise RecipeError("trainer.val_only", "is True: the script trains nothing", fix="remove it")
    if get("distillation.enabled"):
        fact = "is True: the policy learns from a teacher, too"
        raise RecipeError(
            "distillation.enabled", fact, fix="a recipe with algorithm: distill, as recipes/distill_tiny.yaml"
        )
    models = _models(arguments, model)
    graph = graph_of(arguments)
    name = f"{Path(model).name}_{_algorithm(graph)}".lower()
    content: dict[str, Any] = {"name": re.sub(r"[^a-z0-9._-]+", "_", name).strip("_"), "models": {}}
    cards = {name: model_card(name, path, content["models"], arguments) for name, path in models.items()}
    content["models"] = {name: options for name, options in content["models"].items() if options}
    if not content["models"]:
        del content["models"]
    content["steps"] = _steps(arguments)
    if (seed := get("data.seed")) is not None:
        content["seed"] = seed
    reads_images = bool(_IMAGES.search(Path(model).name))
    content["roles"] = roles_of(arguments, content["steps"], models)
    if reads_images and not get(f"{ACTOR}.freeze_vision_tower"):
        content["roles"]["actor"]["train"] = "all"
    if arguments.is_one_step_off:
        content["overlap"] = {"max_staleness": 1}
    content["graph"] = graph
    compares_answers = graph["rewards"].get("function") == "number"
    content |= data_of(arguments, compares_answers=compares_answers, reads_images=reads_images)
    every, keep = get("trainer.save_freq") or -1, get("trainer.max_actor_ckpt_to_keep")
    content["checkpoints"] = {"every": every if every > 0 else content["steps"], **({"keep": keep} if keep else {})}
    cluster = _cluster(arguments)
    _note_version(arguments)
    for key in arguments.values.keys() - arguments.used:
        arguments.note(f"{key}={arguments.values[key]}", reason_without_place(key, content["roles"]))
    return Converted(_recipe_text(content, cards), cluster, dict(sorted(arguments.remarks.items())))


def _models(arguments: Arguments, policy: str) -> dict[str, str]:
    """Return the path of each model. Raises RecipeError for a policy that reads images in an unsupported way."""
    name = Path(policy).name
    if _IMAGES.search(name) and not _SUPPORTED.search(name):
        fact = f"'{policy}' reads images, and is no model of a type that rlflow trains"
        known = ("Qwen2.5-VL", "Qwen3-VL", "InternVL3-*-hf")
        raise RecipeError("actor_rollout_ref.model.path", fact, known=known, fix="use one of these models")
    models = {"policy": policy}
    if arguments.get("algorithm.adv_estimator") == "gae":
        critic = str(arguments.get("critic.model.path") or policy)
        models |= {"critic": critic} if critic != policy else {}
    reference = arguments.first("actor_rollout_ref.ref.model.path", "actor_rollout_ref.ref.model_path")
    if reference and str(reference) != policy and has_reference(arguments) and not has_adapters(arguments):
        models["reference"] = str(reference)
    if reward := reward_model_of(arguments):
        models["reward"] = reward
    return {name: from_home(path) for name, path in models.items()}


def _algorithm(graph: Mapping[str, Any]) -> str:
    """Return a word for the name of the run."""
    words = {"gae_advantage": "ppo", "group_advantage": "grpo", "leave_one_out_advantage": "rloo"}
    words |= {"greedy_advantage": "remax", "token_advantage": "reinforce_plus_plus"}
    return words.get(graph["advantages"]["node"], "reinforce_plus_plus_baseline")


def _cluster(arguments: Arguments) -> str:
    """Return the shape of the cluster. Trainer and rollout share hosts where these have enough GPUs for both."""
    get = arguments.get
    hosts, gpus = get("trainer.nnodes"), get("trainer.n_gpus_per_node")
    if not arguments.is_one_step_off:
        return f"{hosts}x{gpus}"
    rollout_hosts, rollout_gpus = get("rollout.nnodes"), get("rollout.n_gpus_per_node")
    if hosts == rollout_hosts and gpus + rollout_gpus <= 8:
        return f"{hosts}x{gpus + rollout_gpus}"
    if gpus != rollout_gpus:
        remark = f"the script has {hosts}x{gpus} GPUs that train and {rollout_hosts}x{rollout_gpus} that generate"
        arguments.note("cluster", remark)
    return f"{hosts + rollout_hosts}x{max(gpus, rollout_gpus)}"


def _steps(arguments: Arguments) -> int:
    steps, epochs = arguments.get("trainer.total_training_steps"), arguments.get("trainer.total_epochs")
    if steps is not None:
        return int(steps)
    batch = arguments.get("data.train_batch_size")
    arguments.note("steps", f"100 is a guess: write rows of the data / {batch}, times {epochs} epochs")
    return 100


def _note_version(arguments: Arguments) -> None:
    """Add a remark where a script may be for a version of verl with other defaults."""
    key = next(filter(_OLD.fullmatch, arguments.values), None)
    if key is None:
        return
    facts = []
    if "actor_rollout_ref.actor.entropy_coeff" not in arguments.values:
        facts.append("an entropy_coeff of 0.001")
    if "actor_rollout_ref.actor.clip_ratio_c" not in arguments.values:
        facts.append("no dual clip")
    if not any("use_kl" in key and value for key, value in arguments.values.items()):
        facts.append("use_kl_in_reward=True")
    if facts:
        remark = f"verl before 0.3 had {key}, and then other defaults: {', '.join(facts)}; the recipe has those of 0.9"
        arguments.note("the version of verl", remark)


def _recipe_text(content: Mapping[str, Any], cards: Mapping[str, str | None]) -> str:
    """Return the recipe with a line for each model, role, node and section."""
    lines = ["# @package _global_"]
    if any(cards.values()):
        known = [f"  - /model@models.{name}: {card}" for name, card in cards.items() if card is not None]
        lines += ["defaults:", *known, "  - _self_"]
    for name, value in content.items():
        if not isinstance(value, Mapping) or not all(isinstance(inner, Mapping) for inner in value.values()):
            lines.append(f"{name}: {_flow(value)}")
        else:
            lines += [f"{name}:", *(f"  {key}: {_flow(inner)}" for key, inner in value.items())]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(_escaped(value), default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _escaped(value: Any) -> Any:
    """Return a value whose texts refer to no other value of the recipe, except those that the converter writes."""
    if isinstance(value, Mapping):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, str):
        return re.sub(r"\$\{(?!graph\.)([^{}]*)\}?", r"$\1", value)
    return [_escaped(inner) for inner in value] if isinstance(value, list) else value
