"""Models that read each other's tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.preflight import check_vocabularies
from rlflow.runtime.run import run
from tests.helpers import CHARACTERS, MODEL, load


def taught_by(characters: str) -> Plan:
    recipe = load("recipe=distill_tiny")
    teacher = replace(MODEL, characters=characters)
    return rlflow.compile(replace(recipe, models={**recipe.models, "teacher": teacher}), "local")


def test_of_models_that_are_yet_to_be_made() -> None:
    check_vocabularies(rlflow.compile(load("recipe=distill_tiny"), "local"))


def test_a_teacher_may_know_more() -> None:
    check_vocabularies(taught_by(CHARACTERS + "-"))


@pytest.mark.parametrize(
    ("characters", "fact"),
    [
        ("0123456789=+", "'\\+' has number 11; here it has number 12"),
        ("0123456789+", "'=' has number 12; here it has no such token"),
    ],
)
def test_a_different_vocabulary_is_an_error_before_anything_runs(characters: str, fact: str, tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=f"^roles.teacher.model: 'teacher' reads the tokens of 'policy', where .*{fact}"
    ):
        run(taught_by(characters), tmp_path / "run", LocalRuntime())
    assert not (tmp_path / "run").exists()
