"""Names become folders, so none of them may lead out of a run's folder or of the cache."""

from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

import rlflow
from rlflow.errors import RecipeError
from rlflow.recipe import Recipe
from rlflow.recipe.load import recipe_from
from tests.conftest import CONFIG_DIR

BAD = ["../../../escaped", "/tmp/escaped", "..", ".", "", "a/b", "a\\b", "a b", "a\n", "ä", "a" * 101, "~", "a\x00"]


@cache
def fake_recipe() -> Recipe:
    return rlflow.load(["recipe=fake"], CONFIG_DIR)


def fake() -> dict[str, Any]:
    return asdict(fake_recipe())


@pytest.mark.parametrize("section", ["name", "models", "roles", "graph"])
def test_a_name_that_is_a_path_is_refused(section: str) -> None:
    for name in BAD:
        mapping = fake()
        if section == "name":
            mapping["name"] = name
        else:
            mapping[section][name] = next(iter(mapping[section].values()))
        with pytest.raises(RecipeError) as raised:
            recipe_from(mapping)
        said = str(raised.value)
        assert said.startswith((f"{section}: {name!r} is not a valid name", f"{section}: has the character U+00"))


def test_ordinary_names_are_allowed() -> None:
    assert recipe_from(fake() | {"name": "Qwen2.5-7B_v1.0"}).name == "Qwen2.5-7B_v1.0"
