"""The experiment of a run, and how far a run that goes on from a checkpoint may differ from it."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rlflow.errors import RecipeError
from rlflow.recipe import Optimizer, Recipe
from rlflow.recipe.evaluation import Evaluation
from rlflow.resources.layout import Resources

Experiment = Mapping[str, Any]

# A step reads these anew, so they may change between two steps. The optimizer's state belongs to its other options.
_MAY_CHANGE = re.compile(
    r"steps|evaluation(\..*)?|data\.batch_size|roles\.\w+\.optimizer\.(learning_rate|schedule|warmup_steps)"
)
_ABSENT = object()
# Options of an evaluation that leave the experiment as it is while they have these defaults.
_EVALUATION = {
    key: value
    for key, value in asdict(Evaluation(every=1, num_prompts=1)).items()
    if key not in ("every", "num_prompts")
}
# Without them an architecture is what it was before they were known.
_OF_SOME_MODELS = frozenset(
    [
        "recurrent",
        "num_mlp_layers",
        "moe_latent_size",
        "global_head_dim",
        "num_global_key_value_heads",
        "attention_k_eq_v",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        "hidden_size_per_layer_input",
        "encoder_parameters",
    ]
)
_NOT_OF_THE_EXPERIMENT = {"architecture", "architecture_of", "trust_remote_code"}


def experiment_of(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe, and those that make its models, train wherever they run, as JSON has it.

    That is the recipe without what it pins of the placement, its checkpoints, what it expects, when skipped steps or
    lost workers end it, what receives its metrics and its model, and the figures of models that have files of their
    own.
    """
    experiment: dict[str, Any] = json.loads(json.dumps(_experiment(asdict(recipe))))
    return experiment


def check_continuation(before: Experiment, now: Experiment, run: object) -> None:
    """Raise RecipeError where a checkpoint of ``before``, in the folder ``run``, cannot go on as ``now``."""
    differences = _differences(_with_optimizers(before), _with_optimizers(now))
    changed = {path: values for path, values in differences if not _may_change(path, now)}
    if not changed:
        return
    path, (old, new) = next(iter(changed.items()))
    again = f"{path}={_shown(old)}, or resume={run} without recipe="
    more = f", and {len(changed) - 1} more: {', '.join(list(changed)[1:])}" if len(changed) > 1 else ""
    raise RecipeError(
        "resume",
        f"'{run}' was trained with {path} {_shown(old)}, this recipe has {_shown(new)}{more}",
        known=(
            "steps",
            "evaluation",
            "data.batch_size without overlap",
            "learning_rate, schedule and warmup_steps of an optimizer",
        ),
        fix=f"{again}, or a new run that starts from models.NAME.path={run}/model/ROLE",
    )


def is_same_but_longer(before: Experiment, now: Experiment) -> bool:
    """Return whether the two differ in ``steps`` at most."""
    return all(path == "steps" for path, _ in _differences(before, now))


def _with_optimizers(experiment: Experiment) -> dict[str, Any]:
    """Return ``experiment`` with the defaults in the place of optimizers that are not written."""
    default = json.loads(json.dumps(asdict(Optimizer())))
    roles = {name: role | {"optimizer": role["optimizer"] or default} for name, role in experiment["roles"].items()}
    return {**experiment, "roles": roles}


def _may_change(path: str, now: Experiment) -> bool:
    if path == "data.batch_size" and "overlap" in now:
        return False  # rollouts in a checkpoint remember their prompts by step
    return _MAY_CHANGE.fullmatch(path) is not None


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the paths of all values that differ, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            below = f"{path}.{key}" if path else key
            yield from _differences(before.get(key, _ABSENT), now.get(key, _ABSENT), below)
    elif before != now:
        yield path, (before, now)


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value)


def _figures(architecture: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the figures of a model; those of layers that it does not have are left out."""
    if architecture is None:
        return None
    return {key: value for key, value in architecture.items() if value or key not in _OF_SOME_MODELS}


def _experiment(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a recipe, and of the recipes that make its models, that do not depend on where it runs."""
    left_out = {"checkpoints", "elastic", "expect", "max_restarts", "stop_after_skipped_steps", "trackers"}
    left_out |= {"models", "push_to_hub", "roles"}
    models = {
        # The figures of a model that has files of its own are no part of the experiment.
        name: {key: value for key, value in model.items() if key not in _NOT_OF_THE_EXPERIMENT}
        | ({} if model["path"] is not None else {"architecture": _figures(model["architecture"])})
        | {"recipe": _experiment(model["recipe"]) if model["recipe"] is not None else None}
        for name, model in recipe["models"].items()
    }
    roles = {
        # Without ``lora`` it is what it was before there was one.
        name: {
            key: value
            for key, value in role.items()
            if key not in Resources.__dataclass_fields__ and (key, value) != ("lora", None)
        }
        for name, role in recipe["roles"].items()
    }
    # With its default it is what it was before there was one, and so is an evaluation.
    data = {key: value for key, value in recipe["data"].items() if (key, value) != ("overlong", "error")}
    evaluation = recipe["evaluation"] and {
        key: value for key, value in recipe["evaluation"].items() if (key, value) not in _EVALUATION.items()
    }
    if not recipe["overlap"]["max_staleness"]:
        left_out.add("overlap")
    kept = {key: value for key, value in recipe.items() if key not in left_out}
    return kept | {"models": models, "roles": roles, "data": data, "evaluation": evaluation}
