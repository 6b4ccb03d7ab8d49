"""Translates command-line arguments into overrides that Hydra understands."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rlflow._version import __version__
from rlflow.errors import RecipeError, did_you_mean

_PACKAGE = Path(__file__).parents[1]
# Beside the package in a checkout, inside it in a wheel.
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"

SHORT_KEYS = {
    "lr": "roles.actor.optimizer.learning_rate",
    "learning_rate": "roles.actor.optimizer.learning_rate",
    "n": "graph.rollouts.group_size",
}
"""Short keys for the command line, with the recipe keys that they stand for."""

_HELP = """\
rlflow {version}: plan and run RL post-training of language models.

Usage: rlflow [KEY=VALUE ...]     (python -m rlflow is the same)

  rlflow                                     plan and train the default recipe
  rlflow recipe=grpo_32b cluster=2x8@h100 dry_run=true
                                             print the plan, start nothing
  rlflow recipe=grpo_7b                      train on the GPUs of this machine
  rlflow recipe=path/to/mine.yaml            train your own recipe
  rlflow steps=50 lr=1e-4 n=16               change keys of the recipe
  rlflow -m recipe=grpo_7b cluster=1x8,2x8 dry_run=true
                                             compare the plans of a sweep
  rlflow resume=FOLDER steps=+100            continue a run for 100 more steps
  rlflow plan=FOLDER/plan.json               run a saved plan
  rlflow tune=true                           find faster sizes while it runs

Commands (rlflow COMMAND --help says more):
  doctor         check this machine     watch FOLDER    show a run as it goes on
  report FOLDER  show or compare runs   replay FOLDER   repeat a skipped step
  calibrate      measure this machine   convert SCRIPT  make a recipe from verl
Recipes: {recipes}
Every key of a recipe can be set here; explain=true shows more of a plan.
Hydra's own options: rlflow --hydra-help
"""
_NAMES_IN_HELP = ("grpo_tiny", "ppo_tiny", "dpo_tiny", "sft_tiny", "grpo_7b", "grpo_32b")


def help_text() -> str:
    """Return the text of ``--help``, which fits on one screen of 80 columns."""
    more = len(list((CONF / "recipe").glob("*.yaml"))) - len(_NAMES_IN_HELP)
    recipes = f"{', '.join(_NAMES_IN_HELP)}, {more} more"
    return _HELP.format(version=__version__, recipes=recipes)


def hydra_arguments(typed: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Translate the arguments that were typed into overrides for Hydra. Raises RecipeError.

    Users may set keys that the recipe does not have, give a recipe as a file, and abbreviate kinds of GPU.
    ``config_dir`` is the user's own folder of configuration files.
    """
    if {"-sc", "--shell-completion"} & set(typed):
        return _check_completion(typed)
    groups = {entry.name for entry in CONF.iterdir() if entry.is_dir()}
    added = [*_recipe_of_resumed_run(typed), *_direction_of_optuna(typed)]
    return [_translate(argument, groups, config_dir) for argument in [*typed, *added]]


def recipe_argument(name: str) -> str:
    """Return the argument for a recipe that another recipe names by its name or as a file.

    Hydra would read other names as lists, deletions or functions.
    """
    is_file = "/" in name or name.endswith(".yaml")
    return f"recipe={name if is_file else _quote(name)}"


def typed_config_dir() -> Path | None:
    """Return the user's own folder of configuration files, from this process's arguments."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    known: Path | None = parser.parse_known_args()[0].config_dir
    return known


def is_yaml_constant(value: str) -> bool:
    """Return whether ``value`` means true, false or null in YAML, and so is not a path."""
    return value.lower() in ("true", "false", "null", "yes", "no", "on", "off", "")


def _check_completion(typed: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra's shell completion. Raises RecipeError when its action is missing."""
    if not any(argument.startswith(("install=", "uninstall=", "query=")) for argument in typed):
        known = ("install=SHELL", "uninstall=SHELL", "query=SHELL")
        raise RecipeError("--shell-completion", "is incomplete", known=known, fix='eval "$(rlflow -sc install=bash)"')
    return list(typed)


def _recipe_of_resumed_run(typed: Sequence[str]) -> list[str]:
    """Return an override with the recipe of the run in ``resume=FOLDER``, unless a recipe or plan is given."""
    keys = dict(argument.split("=", 1) for argument in typed if "=" in argument)
    folder = keys.get("resume", "").strip("'\"")
    if is_yaml_constant(folder) or {"recipe", "plan"} & keys.keys():
        return []
    file = Path(os.path.expanduser(folder)) / "recipe.yaml"
    return [f"recipe={file}"] if file.is_file() else []


def _direction_of_optuna(typed: Sequence[str]) -> list[str]:
    """Return an override that makes Optuna maximize the evaluations of runs; by default it minimizes, as for plans."""
    if "hydra/sweeper=optuna" not in typed or any(text.startswith("hydra.sweeper.direction=") for text in typed):
        return []
    return [] if {"dry_run=true", "dry_run=True"} & set(typed) else ["hydra.sweeper.direction=maximize"]


def _translate(argument: str, groups: set[str], config_dir: Path | None) -> str:
    key, equals, value = argument.partition("=")
    if not equals or key.startswith(("-", "hydra.", "hydra=")) or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        return argument
    if key in groups and "${" in value:
        raise RecipeError(key, "the name of a file cannot have a reference", fix=f"write the name: {key}=NAME")
    # Not for every group: a recipe has a key data too, which may be a mapping.
    if key in ("recipe", "cluster") and value.startswith(("[", "{")):
        raise RecipeError(key, f"{value} is not a name", fix=f"{key}=NAME, or -m {key}=NAME,OTHER for a sweep")
    if key in groups:
        return f"{key}={','.join(_quote_choice(key, choice, config_dir) for choice in value.split(','))}"
    # '++' sets a key whether or not it exists. The recipe's own check reports unknown keys more clearly than Hydra.
    key = SHORT_KEYS.get(key, key)
    # Hydra would read +100 as 100.
    value = f"'{value}'" if key == "steps" and value.startswith("+") else value
    return f"++{key}={value}"


def _quote_choice(group: str, name: str, config_dir: Path | None) -> str:
    if group == "recipe" and (file := _recipe_file(name.strip("'\""), config_dir)) is not None:
        return _quote(str(file))
    if group == "cluster":
        name = re.sub(r"(?<=@)\w+", lambda kind: _complete_gpu_kind(kind[0], config_dir), name)
    # Quoted where YAML would read the name as a number or as null.
    return _quote(name) if re.fullmatch(r"[\d.e_-]+|(?i:nan|inf)", name) or is_yaml_constant(name) else name


def _quote(text: str) -> str:
    """Return ``text`` in quotes, in which Hydra reads it as it is."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda end: end[1] * 2 + end[2].replace("'", "\\'"), text) + "'"


def _recipe_file(name: str, config_dir: Path | None) -> Path | None:
    """Return the absolute path of a recipe that is given as a file; None if ``name`` is a recipe's name."""
    # Path.expanduser raises an error for "~nobody"; here it is a name like any other.
    path = Path(os.path.expanduser(name))
    if "/" not in name and path.suffix != ".yaml":
        return None
    for file in (path, Path(f"{path}.yaml")):
        if file.is_file():
            return file.resolve()
    if path.is_dir():
        raise RecipeError("recipe", f"'{name}' is a folder", fix="name a file in it: recipe=FOLDER/NAME.yaml")
    if config_dir is not None and (config_dir / "recipe" / f"{name}.yaml").is_file():
        return None
    near = did_you_mean(path.name, (file.name for file in path.parent.glob("*.yaml")))
    raise RecipeError("recipe", f"the file '{name}' does not exist", fix=near or f"a path relative to {Path.cwd()}")


def _complete_gpu_kind(name: str, config_dir: Path | None) -> str:
    """Return the only kind of GPU that begins with ``name``, such as h100_80gb for h100; otherwise ``name`` itself."""
    folders = [CONF / "gpu", *([config_dir / "gpu"] if config_dir else [])]
    kinds = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    longer = [kind for kind in kinds if kind.startswith(f"{name}_")]
    return longer[0] if name not in kinds and len(longer) == 1 else name
