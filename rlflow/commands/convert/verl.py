"""Scripts of verl as recipes.

A recipe trains as its script does with verl's defaults; how it is laid out on GPUs is left to the planner. Every
argument has a place in the recipe, or a remark that says why it has none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from rlflow.commands.convert.arguments import read_arguments
from rlflow.commands.convert.verl_arguments import OVERLONG, WITHOUT_PLACE, Arguments
from rlflow.commands.convert.verl_graph import ESTIMATORS, graph_of
from rlflow.commands.convert.verl_roles import model_card, roles_of
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


def convert(script: str) -> Converted:
    """Convert the text of a script. Raises RecipeError for a script of an algorithm without nodes."""
    arguments = read_arguments(script)
    arguments.check()
    algorithm = arguments.get("algorithm.adv_estimator")
    if algorithm not in ESTIMATORS:
        fix = "algorithm: NAME in a recipe of your own; see docs/algorithms.md"
        raise RecipeError("algorithm.adv_estimator", f"'{algorithm}' is not converted", known=ESTIMATORS, fix=fix)
    model = str(arguments.get("actor_rollout_ref.model.path") or "")
    if not model:
        raise RecipeError("actor_rollout_ref.model.path", "is missing", fix="the arguments of verl.trainer.main_ppo")
    name = f"{Path(model).name}_{'ppo' if algorithm == 'gae' else algorithm}".lower()
    content: dict[str, Any] = {"name": re.sub(r"[^a-z0-9._-]+", "_", name), "models": {}}
    models = {"policy": model}
    if algorithm == "gae" and (critic := str(arguments.get("critic.model.path") or model)) != model:
        models["critic"] = critic
    cards = {name: model_card(name, path, content["models"], arguments) for name, path in models.items()}
    if not content["models"]:
        del content["models"]
    content["steps"] = _steps(arguments)
    if (seed := arguments.get("data.seed")) is not None:
        content["seed"] = seed
    content["roles"] = roles_of(arguments, content["steps"], critic="critic" if "critic" in models else "policy")
    content["graph"] = graph_of(arguments)
    content["data"] = data_of(arguments)
    content |= _evaluation(arguments) if "eval_split" in content["data"] else {}
    every, keep = arguments.get("trainer.save_freq"), arguments.get("trainer.max_actor_ckpt_to_keep")
    content["checkpoints"] = {"every": every if every > 0 else content["steps"], **({"keep": keep} if keep else {})}
    cluster = f"{arguments.get('trainer.nnodes')}x{arguments.get('trainer.n_gpus_per_node')}"
    for key in arguments.values.keys() - arguments.used:
        reason = next((why for pattern, why in WITHOUT_PLACE.items() if fnmatch(key, pattern)), "not known to rlflow")
        arguments.note(f"{key}={arguments.values[key]}", reason)
    return Converted(_recipe_text(content, cards), cluster, dict(sorted(arguments.remarks.items())))


def _steps(arguments: Arguments) -> int:
    steps, epochs = arguments.get("trainer.total_training_steps"), arguments.get("trainer.total_epochs")
    if steps is not None:
        return int(steps)
    batch = arguments.get("data.train_batch_size")
    arguments.note("steps", f"100 is a guess: write rows of the data / {batch}, times {epochs} epochs")
    return 100


def _evaluation(arguments: Arguments) -> dict[str, Any]:
    every = arguments.get("trainer.test_freq")
    if every <= 0:
        return {}
    arguments.note("evaluation.num_prompts", "rlflow evaluates the first 512 rows; check the number")
    return {"evaluation": {"every": every, "num_prompts": 512}}


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
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def data_of(arguments: Arguments) -> dict[str, Any]:
    """Return the section ``data``."""
    get = arguments.get
    train = _file(get("data.train_files") or "train.parquet", "data.train_files", arguments)
    evaluated = _file(get("data.val_files") or "", "data.val_files", arguments)
    data: dict[str, Any] = {"source": train}
    if Path(train).name == "train.parquet" and evaluated == str(Path(train).with_name("test.parquet")):
        # A folder with a file for each split.
        data = {"source": str(Path(train).parent), "eval_split": "test"}
    elif evaluated:
        arguments.note(
            f"data.val_files={evaluated}", "put both files into one folder, as train.parquet and test.parquet"
        )
    if "$" in data["source"]:
        arguments.note("data.source", "has a variable of the shell; write the path")
    if (column := get("data.prompt_key")) != "prompt":
        data["columns"] = {"prompt": column}
    arguments.note("the column answer", "verl's rows have it in reward_model.ground_truth; give it a column of its own")
    data |= {"batch_size": get("data.train_batch_size"), "max_prompt_tokens": get("data.max_prompt_length")}
    if get("data.filter_overlong_prompts"):
        data["overlong"] = "drop"
        get("data.truncation")
    elif (truncation := get("data.truncation")) != "error":
        if truncation not in OVERLONG:
            arguments.note(f"data.truncation={truncation}", "not supported; prompts lose their beginning")
        data["overlong"] = "truncate_left"
    return data


def _file(files: Any, key: str, arguments: Arguments) -> str:
    """Return the path of a file, the first of several."""
    files = files if isinstance(files, list) else [files]
    if len(files) > 1:
        arguments.note(
            f"{key}={files}", f"only {files[0]} is in the recipe; a folder with the files {{split}}-*.parquet has all"
        )
    return str(files[0]) if files else ""
