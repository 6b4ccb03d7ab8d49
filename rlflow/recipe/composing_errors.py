"""Explains what Hydra and OmegaConf report while they compose a configuration."""

import re
from collections.abc import Callable, Mapping

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from rlflow.errors import FileError, RecipeError, did_you_mean
from rlflow.recipe.sources import circular_defaults_error

COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, RecursionError)


def _fix_for_unknown(group: str, name: str) -> str:
    if group == "recipe":
        return "give the path of a recipe of your own, such as recipe=./mine.yaml"
    return f"add a file {group}/{name}.yaml to a folder and give it with --config-dir"


def composing_error(error: Exception) -> RecipeError:
    """Convert an error of Hydra's to a RecipeError."""
    if isinstance(error, RecursionError):
        return circular_defaults_error(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = sorted(str(option) for option in error.options or [])
        known = [*options, "shapes such as 2x8 or 7x8+1x7@h200"] if group == "cluster" else options
        return RecipeError(
            {"": "command line", "gpu": "cluster"}.get(group, group),
            f"no {group.rpartition('/')[2] or 'configuration'} '{name}'",
            known=known,
            fix=did_you_mean(name, options) or _fix_for_unknown(group, name),
        )
    reason = " ".join(str(error).split("\nSee ")[0].split()).rstrip(".") or type(error).__name__
    for pattern, explain in _EXPLANATIONS.items():
        if match := re.match(pattern, reason):
            return explain(match)
    return RecipeError("command line", reason, fix="rlflow --help shows how overrides are written")


def _merging_error(match: re.Match[str]) -> RecipeError:
    fix = f"write the keys to change: {match[1]}={{KEY: VALUE}}"
    return RecipeError(match[1], f"keys with values cannot be replaced by {match[2]}", fix=fix)


def _file_error(match: re.Match[str]) -> RecipeError:
    fact = f"does not fit the files that it starts from ({match[2]})"
    return FileError(match[1], fact, fix="write sections as keys with values, as they have them: {KEY: VALUE}")


def _choice_error(match: re.Match[str]) -> RecipeError:
    fact = f"the defaults of its files choose '{match[1]}' more than once, the last time '{match[2]}'"
    return RecipeError("recipe", fact, fix=f"keep one, or write 'override /{match[1]}: {match[2]}' for the last")


def _comma_error(match: re.Match[str]) -> RecipeError:
    fact = f"a comma separates the values of a sweep, got {match[2]}"
    fix = f"-m for a sweep, or {match[1]}=[{match[2]}] for a list; numbers have no commas"
    return RecipeError(match[1], fact, fix=fix)


def _quoting_error(match: re.Match[str]) -> RecipeError:
    fix = f"quote a text for the shell and for Hydra: \"{match[1]}='TEXT'\", with \\' for an apostrophe in it"
    return RecipeError(match[1], f"{match[2]} cannot be read", fix=fix)


def _word_error(match: re.Match[str]) -> RecipeError:
    fact = f"'{match[1]}' is neither a command nor KEY=VALUE"
    return RecipeError("command line", fact, fix="rlflow --help lists the commands")


_EXPLANATIONS: Mapping[str, Callable[[re.Match[str]], RecipeError]] = {
    r"Error merging override \+*([\w.]+)=(.*)": _merging_error,
    r"In '(?:recipe/(?=/))?(.+?)': \w+ raised while composing config: (.*)": _file_error,
    r"Multiple values for (\S+)\. To override a value use 'override \S+: (\S+)'": _choice_error,
    r"Ambiguous value for argument '\+*([\w.]+)=(.*?)' 1\.": _comma_error,
    r"Error parsing override '([\w-]+)' missing EQUAL": _word_error,
    r"LexerNoViableAltException: \+*([\w.]+)=(.*?) \^": _quoting_error,
    r"Error parsing override '\+*([\w.]+)=(.*?)' (?:extraneous|mismatched|missing|no viable)": _quoting_error,
}
"""The explanation of each message of Hydra's, by its pattern."""
