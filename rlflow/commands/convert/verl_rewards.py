"""The reward of a recipe for a script of verl."""

from pathlib import Path
from typing import Any

from rlflow.commands.convert.verl_arguments import Arguments
from rlflow.commands.convert.verl_roles import reward_model_of

# Older versions of verl have these at the top level.
_FUNCTION = ("reward.custom_reward_function", "custom_reward_function")
_MANAGER = ("reward.reward_manager.name", "reward_model.reward_manager", "reward_manager.name", "reward.reward_manager")
_DEFAULT = "verl chooses the reward by a row's data_source; rlflow compares numbers"


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
