"""The arguments of verl's trainer in a shell script, read as Hydra reads them."""

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlflow.commands.convert.shell import read_script
from rlflow.commands.convert.verl_arguments import Arguments
from rlflow.errors import RecipeError

_TRAINER = re.compile(r"(.*[./])?main_(?!eval|generation)\w+(\.py)?")
_FIX = "the command with the arguments of verl.trainer.main_ppo"


def read_arguments(script: str) -> Arguments:
    """Return the arguments of the script's training command. Raises RecipeError if it has several."""
    read = read_script(script)
    # Without the name of a trainer, the text holds nothing but arguments, or the name is in a variable.
    trainers = [words for words in read.commands if any(map(_TRAINER.fullmatch, words))]
    if len(trainers) > 1:
        raise RecipeError("script", f"has {len(trainers)} commands that train", fix="keep the one to convert")
    if trainers:
        name = next(index for index, word in enumerate(trainers[0]) if _TRAINER.fullmatch(word))
        words: Sequence[str] = trainers[0][name + 1 :]
    else:
        words = [word for words in read.commands for word in words if re.match(r"\+{0,2}\w+(\.\w+)+=", word)]
    values = dict[str, Any]()
    remarks = {f"${name}": _describe_choice(values_of_name) for name, values_of_name in read.choices.items()}
    for word in words:
        key, value, remark = _read(word)
        if remark:
            remarks[word] = remark
        else:
            values[key] = value
    return Arguments(values, remarks)


def _describe_choice(values: Sequence[str]) -> str:
    return f"{' or '.join(dict.fromkeys(values))} in the script; {values[0]} is used"


def _read(word: str) -> tuple[str, Any, str]:
    """Return an argument's key and value, or why the word is none."""
    if word.startswith("-"):
        return "", None, "options of Hydra are not read; give the values of a configuration of your own as arguments"
    key, equals, text = word.partition("=")
    if key.startswith("$"):
        return "", None, "is only known when the script runs; add its arguments to the script"
    if key.startswith("~"):
        return "", None, "removes a part of verl's configuration, which a recipe does not have"
    if not equals:
        return "", None, "expected key=value"
    key = key.lstrip("+")
    if "." not in key:
        return "", None, "chooses a part of verl's configuration, which a recipe does not have"
    try:
        override = OverridesParser.create().parse_override(word)
        value = text if override.is_sweep_override() else override.value()
    except HydraException:
        # The value is not known before the shell has run: $(date).
        value = text
    return key, value, ""
