"""The arguments of verl's trainer in a shell script, read as Hydra reads them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlflow.commands.convert.shell import read_script
from rlflow.commands.convert.verl_arguments import Arguments
from rlflow.errors import RecipeError

_ARGUMENT = re.compile(r"[+~]{0,2}[\w@/]+(\.[\w@/-]+)+=.*", re.DOTALL)
# Configurations of verl's that have the same algorithm as verl's default.
_CONFIG_NAME = re.compile(r"((one_step_off_)?ppo|dapo)(_megatron)?_trainer(\.yaml)?")
_HYDRA_OPTION = re.compile(r"(--config-(?:name|path|dir)|-cn|-cp|-cd)(?:=(.*))?")
# Arguments without a dot that choose a part of verl's configuration.
_GROUPS = re.compile(r"[\w/]+@[\w.]+|model_engine|actor|critic|ref|rollout|reward|algorithm|data|model")
# Trainers of verl that are converted.
_PPO = ("main_ppo", "main_ppo_v0", "main_ppo_sync", "main_dapo", "async_main_ppo")
# The recipe to write for trainers of another kind, by a part of their name.
_OTHER_KINDS: Mapping[str, str] = {
    "sft": "a recipe with algorithm: sft, as recipes/sft_tiny.yaml",
    "fully_async": "verl.trainer.main_ppo in its place, and in the recipe overlap: {max_staleness: 2, in_flight: keep}",
    "gkd": "a recipe with algorithm: distill_top, as recipes/distill_top_tiny.yaml",
}


def read_arguments(script: str) -> Arguments:
    """Return the arguments of the script's training command.

    Raises RecipeError if it has several, and for a trainer whose algorithm is not converted.
    """
    read = read_script(script)
    # A command of a branch that is not taken is the script's own where no other trains.
    trainings = _trainings(read.commands) or _trainings(read.skipped_commands)
    if len(trainings) > 1:
        raise RecipeError("script", f"has {len(trainings)} commands that train", fix="keep the one to convert")
    remarks = {
        f"${name}": f"{' or '.join(dict.fromkeys(value or repr('') for value in choices))} in the script; "
        f"{choices[0] or repr('')} is used"
        for name, choices in read.choices.items()
    }
    trainer, words = "", [word for words in read.commands for word in words if _ARGUMENT.fullmatch(word)]
    if trainings:
        [command] = trainings
        if trainer := trainer_of(command):
            words = list(command)[command.index(trainer) + 1 :]
    values = _values(words, remarks)
    for command in read.commands if trainings else ():
        if command and _ARGUMENT.fullmatch(command[0]):
            # A comment between the lines of a command ends it, and the shell takes the rest for another one.
            remarks |= dict.fromkeys(command, "is not among the arguments of the command; remove the line before it")
    return Arguments(values, remarks, is_one_step_off=check_trainer(trainer, values, remarks))


def _trainings(commands: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """Return the commands that train: by the name of verl's trainer, or by arguments for it."""
    keys = re.compile(r"[+~]{0,2}(actor_rollout_ref|algorithm|trainer|worker|model|optim)\.[\w.]+=.*", re.DOTALL)
    trainings = []
    for words in commands:
        name = trainer_of(words)
        is_verl = re.search(r"(^|[./])main_(?!eval|generation)\w+(\.py)?$", name) or any(map(keys.fullmatch, words))
        if name and is_verl and not re.search(r"main_(eval|generation)", name):
            trainings.append(words)
    return trainings


def _values(words: Sequence[str], remarks: dict[str, str]) -> dict[str, Any]:
    """Return the value of each argument; add a remark for each word that is none.

    Raises RecipeError if the algorithm is in a configuration of the script's own.
    """
    words, config = _without_config(words, remarks)
    values = dict[str, Any]()
    for word in words:
        key, value, remark = _read(word)
        if remark:
            remarks[word] = remark
        else:
            values[key] = value
    if config and "algorithm.adv_estimator" not in values:
        fact = f"is not among the arguments, and the script's own configuration '{config}' is not read"
        raise RecipeError("algorithm.adv_estimator", fact, fix="give its values as arguments in the script")
    return values


def _without_config(words: Sequence[str], remarks: dict[str, str]) -> tuple[list[str], str]:
    """Return the words without Hydra's options for its configuration, and its name if that is not verl's own."""
    options, other_words = dict[str, str](), list[str]()
    waiting = ""
    for word in words:
        option = _HYDRA_OPTION.fullmatch(word)
        if waiting:
            options[waiting], waiting = word, ""
        elif option is None:
            other_words += [] if word in ("", "\\", "&") else [word]
        elif option[2] is None:
            waiting = option[1]
        else:
            options[option[1]] = option[2].strip("'\"")
    name = options.get("--config-name") or options.get("-cn") or ""
    if not options or _CONFIG_NAME.fullmatch(name):
        return other_words, ""
    remark = "is not read; give the values of a configuration of your own as arguments"
    remarks |= {f"{option}={value}": remark for option, value in options.items()}
    return other_words, name


def _read(word: str) -> tuple[str, Any, str]:
    """Return an argument's key and value, or why the word is none."""
    if word.startswith("-"):
        return "", None, "options of Hydra are not read"
    key, equals, text = word.partition("=")
    if key.startswith("$"):
        return "", None, "is only known when the script runs; add its arguments to the script"
    if key.startswith("~"):
        return "", None, "removes a part of verl's configuration, which a recipe does not have"
    if not equals:
        return "", None, "expected key=value"
    key = key.lstrip("+")
    if _GROUPS.fullmatch(key):
        return "", None, "chooses a part of verl's configuration, which a recipe does not have"
    try:
        override = OverridesParser.create().parse_override(word)
        value = text if override.is_sweep_override() else override.value()
    except HydraException:
        # The value is not known before the shell has run: $(date).
        value = text
    return key, value, ""


def trainer_of(words: Sequence[str]) -> str:
    """Return the module or file that a command runs; empty if it has none."""
    for place, word in enumerate(words):
        if word == "-m" and words[place + 1 :]:
            return words[place + 1]
        if word.endswith(".py") and "=" not in word:
            return word
    return next((word for word in words if re.fullmatch(r"(.*[./])?main_\w+", word)), "")


def check_trainer(trainer: str, values: Mapping[str, Any], remarks: dict[str, str]) -> bool:
    """Return whether the trainer generates one step ahead. Add a remark for a trainer that is not verl's own.

    Raises RecipeError, which names the trainer, for one with another algorithm or other defaults.
    """
    module = trainer.removesuffix(".py").replace("/", ".")
    name = module.rpartition(".")[2]
    if not trainer or module.endswith(("verl.trainer.main_ppo", "dapo.main_dapo", "dapo.src.main_dapo")):
        return False
    is_one_step_off = "one_step_off" in module
    if name in _PPO and "fully_async" not in module:
        if not is_one_step_off:
            remarks[trainer] = "read as verl.trainer.main_ppo; what it changes is not known to rlflow"
        return is_one_step_off
    fact = f"'{trainer}' is a trainer of its own, whose algorithm and defaults are not those of main_ppo"
    is_of_verl = name.startswith("main") or module.startswith(("verl.", "recipe."))
    if is_of_verl or "algorithm.adv_estimator" not in values:
        fix = next(
            (fix for part, fix in _OTHER_KINDS.items() if part in module),
            "a recipe of your own; see docs/algorithms.md",
        )
        raise RecipeError("script", f"{fact}: it is not converted", known=["main_ppo", "main_dapo"], fix=fix)
    remarks[trainer] = "is a trainer of its own; its arguments are read as those of verl.trainer.main_ppo"
    return False
