"""Draws recipes with mistakes from a seed: wrong values, missing and doubled keys, deep nesting, wrong references."""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from benchmarks.recipe_rules import COUNTS, FLAGS, INPUTS, KEYS, NOT_NEGATIVE, POSITIVE, SHARES
from rlflow.recipe.compose import compose
from rlflow.recipe.interpolations import to_mapping

RECIPES = (
    *("grpo_tiny", "ppo_tiny", "dapo_tiny", "dpo_tiny", "beginner_tiny", "calculator_tiny", "remax_tiny"),
    *("distill_tiny", "grpo_lora_tiny", "rm_tiny", "cispo_tiny", "dr_grpo_tiny", "gspo_tiny", "rloo_tiny"),
)
_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 1000, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**20, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-30, 1e30, 1e308, float("inf"), float("-inf"), float("nan")),
)
_TEXTS: tuple[Any, ...] = (
    *("", " ", "auto", "null", "true", "5", "1e3", "nan", "..", "../x", "/etc/passwd", "a" * 101, "a" * 100_000),
    *(
        "\x1b[2J",
        "a\x00b",
        "a\nb",
        "\ud800",
        "\u202e",
        "é",
        "${",
        "${steps}",
        "${.name}",
        "${nothing}",
        "${oc.env:HOME}",
    ),
    *(
        "${oc.env:HOME}",
        "${oc.decode:5}",
        "${hydra:runtime.cwd}",
        "???",
        "os:system",
        "a.b:c",
        ":",
        "actor",
        "rollouts",
        "rewards",
    ),
)
_OTHERS: tuple[Any, ...] = (True, False, None, [], {}, [1], ["a"], [[]], {"a": 1}, {"node": "reward"}, {1: 2}, [None])
VALUES = (*_NUMBERS, *_TEXTS, *_OTHERS)
NEW_KEYS = sorted({*COUNTS, *SHARES, *POSITIVE, *NOT_NEGATIVE, *FLAGS, *INPUTS, *" ".join(KEYS.values()).split()})


@dataclass(frozen=True)
class Draw:
    """A recipe with mistakes, or with changes that leave it valid."""

    text: str
    """The file."""
    recipe: Any
    """The contents of the file."""
    must_fail: bool
    """The file itself is wrong, whatever it says."""


def draws(seed: int, count: int) -> Iterator[Draw]:
    """Yield ``count`` recipes, the same for each seed."""
    for number in range(count):
        yield _draw(random.Random(f"{seed} {number}"))


@cache
def _base(name: str) -> dict[str, Any]:
    mapping = to_mapping(compose([f"recipe={name}"]))
    return {key: value for key, value in mapping.items() if key in KEYS[()].split()}


def _draw(draw: random.Random) -> Draw:
    recipe: Any = copy.deepcopy(_base(draw.choice(RECIPES)))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        draw.choice((_set, _set, _set, _set, _delete, _add, _rename, _refer, _nest, _copy))(draw, recipe)
    text = "# @package _global_\n" + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=False)
    if draw.random() < 0.05:
        lines = text.splitlines()
        keys = [line for line in lines[1:] if line.endswith((":", "null")) or ": " in line]
        simple = [line for line in keys if not line.startswith(" ") and not line.endswith(":")]
        if simple:
            return Draw("\n".join([*lines, draw.choice(simple)]) + "\n", recipe, must_fail=True)
    return Draw(text, recipe, must_fail=False)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return each entry as its container and its key or index."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in entries for place in [(value, key), *_places(inner)]]


def _mappings(recipe: Any) -> list[dict[Any, Any]]:
    return [recipe, *(holder[key] for holder, key in _places(recipe) if isinstance(holder[key], dict))]


def _pick(draw: random.Random, recipe: Any) -> tuple[Any, Any]:
    return draw.choice(_places(recipe) or [({"": 0}, "")])


def _set(draw: random.Random, recipe: Any) -> None:
    holder, key = _pick(draw, recipe)
    holder[key] = copy.deepcopy(draw.choice(VALUES))


def _delete(draw: random.Random, recipe: Any) -> None:
    holder, key = _pick(draw, recipe)
    del holder[key]


def _add(draw: random.Random, recipe: Any) -> None:
    draw.choice(_mappings(recipe))[draw.choice(NEW_KEYS)] = copy.deepcopy(draw.choice(VALUES))


def _rename(draw: random.Random, recipe: Any) -> None:
    holder = draw.choice([each for each in _mappings(recipe) if each] or [{"": 0}])
    key = draw.choice(list(holder))
    holder[draw.choice([f"{key}x", str(key)[1:], str(key).upper(), draw.choice(NEW_KEYS), 5, "\x1b[1m"])] = holder.pop(
        key
    )


def _refer(draw: random.Random, recipe: Any) -> None:
    """Exchange the name of a model, role or node for another name."""
    places = [(holder, key) for holder, key in _places(recipe) if key in {"model", "role", "follows", *INPUTS}]
    sections = [recipe.get("graph"), recipe.get("roles")]
    names = [name for section in sections if isinstance(section, dict) for name in section]
    names += ["nobody", "prompts", "pairs", "examples", None]
    if places:
        holder, key = draw.choice(places)
        holder[key] = draw.choice(names)


def _nest(draw: random.Random, recipe: Any) -> None:
    value: Any = 1
    for _ in range(draw.choice((2, 30, 90))):
        value = draw.choice(([value], {"a": value}))
    holder, key = _pick(draw, recipe)
    holder[key] = value


def _copy(draw: random.Random, recipe: Any) -> None:
    """Put a copy of one part of the recipe in the place of another."""
    source, name = _pick(draw, recipe)
    holder, key = _pick(draw, recipe)
    holder[key] = copy.deepcopy(source[name])
