"""Recipes with mistakes, by hand and drawn at random: each is refused with its path and a fix, or planned."""

import random
from pathlib import Path

import pytest

from benchmarks.fuzz_recipes import Mutation, ask_about, ask_about_file, objections, read_mutations
from benchmarks.recipe_fuzzer import draws
from benchmarks.recipe_rules import broken_rules

TABLE = read_mutations()
SAMPLE = random.Random(0).sample(TABLE, 30)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAMPLE, id="sample", marks=pytest.mark.slow),
        pytest.param(TABLE, id="all", marks=pytest.mark.soak),
    ],
)
def test_the_table(cases: list[Mutation], tmp_path: Path) -> None:
    answers = [(case, ask_about(case, tmp_path)) for case in cases]
    assert len({case.rule for case in TABLE}) >= 10
    assert [(case, answer) for case, answer in answers if answer.path != case.path or [*objections(answer)]] == []


@pytest.mark.slow
def test_recipes_drawn_at_random(tmp_path: Path) -> None:
    for drawn in draws(seed=1, count=25):
        answer = ask_about_file(drawn.text, tmp_path)
        assert list(objections(answer)) == []
        if answer.path == "valid":
            assert not drawn.must_fail
            assert broken_rules(drawn.recipe) == []
