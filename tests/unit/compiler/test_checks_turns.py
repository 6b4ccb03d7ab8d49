"""Turns and waits that a recipe expects."""

import pytest

import rlflow
from rlflow.errors import RecipeError
from tests.helpers import load


def turns_of(recipe: str, *overrides: str) -> tuple[int, float]:
    plan = rlflow.compile(load(f"recipe={recipe}", *overrides), "local")
    (generation,) = (task for task in plan.workload.tasks if task.kind == "generate")
    return generation.turns, generation.wait_s


def test_expected_turns_take_the_place_of_the_limit() -> None:
    assert turns_of("guessing_tiny") == (3, 0.0)
    assert turns_of("guessing_tiny", "expect.turns=1.5", "expect.wait_s=2") == (2, 2.0)


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("guessing_tiny", "expect.turns=4", r"^expect\.turns: 4 is more than the 3 turns"),
        ("grpo_tiny", "expect.turns=2", r"^expect\.turns: no node generates in several turns"),
        ("grpo_tiny", "expect.wait_s=2", r"^expect\.wait_s: no node generates in several turns"),
    ],
)
def test_what_is_refused(recipe: str, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        turns_of(recipe, override)
