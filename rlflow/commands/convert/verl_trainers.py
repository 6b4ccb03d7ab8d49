"""Trainers of verl: which of them are converted."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.errors import RecipeError

_PPO = ("main_ppo", "main_ppo_v0", "main_ppo_sync", "main_dapo", "async_main_ppo")
# The recipe to write for trainers of another kind, by a part of their name.
_OTHER_KINDS: Mapping[str, str] = {
    "sft": "a recipe with algorithm: sft, as recipes/sft_tiny.yaml",
    "fully_async": "verl.trainer.main_ppo in its place, and in the recipe overlap: {max_staleness: 2, in_flight: keep}",
    "gkd": "a recipe with algorithm: distill, as recipes/distill_tiny.yaml",
}


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
