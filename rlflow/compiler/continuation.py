"""The experiment of a run, and how far a run that goes on from a checkpoint may differ from it.

The fields of a recipe's data classes say what they are: ``OPERATIONAL`` options are no part of an experiment, and a
step reads those that ``MAY_CHANGE`` anew. An option at its default does not count.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from rlflow.errors import RecipeError
from rlflow.recipe import Model, Recipe
from rlflow.resources.layout import Resources
from rlflow.resources.workload import Overlap
from rlflow.schema import MAY_CHANGE, OPERATIONAL, Section

Experiment = Mapping[str, Any]

_ABSENT = object()


def experiment_of(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe, and those that make its models, train wherever they run, as JSON has it.

    The figures of models that have files of their own are no part of it, nor is an overlap of no steps.
    """
    experiment: dict[str, Any] = json.loads(json.dumps(_experiment(recipe)))
    return experiment


def check_continuation(before: Experiment, now: Experiment, run: object) -> None:
    """Raise RecipeError where a checkpoint of ``before``, in the folder ``run``, cannot go on as ``now``."""
    changed = {
        path: values
        for path, (*values, may_change) in _differences(before, now).items()
        # Rollouts in a checkpoint remember their prompts by step.
        if not may_change or (path == "data.batch_size" and "overlap" in now)
    }
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
    return _differences(before, now).keys() <= {"steps"}


def _experiment(value: Any) -> Any:
    """Return the options of a section, or of those in a mapping, that count."""
    if isinstance(value, Mapping):
        return {key: _experiment(inner) for key, inner in value.items()}
    if not is_dataclass(value):
        return value
    options = {field.name: getattr(value, field.name) for field in _counting_fields(type(value))}
    if isinstance(value, Model) and value.path is not None:
        del options["architecture"]
    if isinstance(value, Recipe) and not value.overlap.max_staleness:
        options["overlap"] = Overlap()
    defaults = {field.name: _default(field) for field in fields(value)}
    return {name: _experiment(option) for name, option in options.items() if option != defaults[name]}


def _counting_fields(section: type[Any]) -> "Iterator[Field[Any]]":
    """Yield the fields of a section that are part of an experiment: not what a role pins of its placement, either."""
    pinned = Resources.__dataclass_fields__ if issubclass(section, Resources) else {}
    for field in fields(section):
        if not OPERATIONAL.items() <= field.metadata.items() and field.name not in pinned:
            yield field


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return _ABSENT if field.default is MISSING else field.default


def _differences(before: Experiment, now: Experiment) -> dict[str, tuple[Any, Any, bool]]:
    """Return the options that differ, by path, with both values, and whether a resumed run may change them."""
    old, new = (dict(_options(Recipe, _with_optimizers(each))) for each in (before, now))
    absent = (_ABSENT, False)
    pairs = {path: (old.get(path, absent), new.get(path, absent)) for path in [*old, *new]}
    return {path: (one[0], other[0], one[1] or other[1]) for path, (one, other) in pairs.items() if one[0] != other[0]}


def _with_optimizers(experiment: Experiment) -> dict[str, Any]:
    """Return ``experiment`` with the defaults in the place of optimizers that are not written."""
    roles = {name: {**role, "optimizer": role.get("optimizer") or {}} for name, role in experiment["roles"].items()}
    return {**experiment, "roles": roles}


def _options(
    section: type[Any], values: Experiment, path: str = "", may_change: bool | None = None
) -> Iterator[tuple[str, tuple[Any, bool]]]:
    """Yield the path of each option of a section, defaults included, with its value and whether it may change.

    ``may_change`` holds for all of them; None: the fields say it.
    """
    hints = get_type_hints(section)
    options = {
        field.name: (values.get(field.name, _as_json(_default(field))), field) for field in _counting_fields(section)
    }
    # A checkpoint of another version may have other options.
    unknown = {name: (value, None) for name, value in values.items() if name not in hints}
    for name, (value, field) in {**options, **unknown}.items():
        changes = may_change
        if may_change is None and field is not None and MAY_CHANGE.items() <= field.metadata.items():
            changes = True
        if value is not _ABSENT:
            yield from _values(hints.get(name), value, f"{path}.{name}" if path else name, changes)


def _values(hint: Any, value: Any, path: str, may_change: bool | None) -> Iterator[tuple[str, tuple[Any, bool]]]:
    """Yield the options in a value whose type is ``hint``: itself, or those of the sections and mappings in it."""
    if not isinstance(value, dict):
        yield path, (value, bool(may_change))
        return
    section = next(
        (kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Section)), None
    )
    if section is not None and get_origin(hint) is not Mapping:
        yield from _options(section, value, path, False if section is Recipe else may_change)
    else:
        for key, inner in value.items():
            yield from _values(section, inner, f"{path}.{key}", may_change)


def _as_json(default: Any) -> Any:
    return default if default is _ABSENT else json.loads(json.dumps(default, default=asdict))


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value)
