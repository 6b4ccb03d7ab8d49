"""The plan's picture for every recipe on several clusters."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.report.console import WIDTH
from rlflow.report.plan_text import render
from tests.conftest import RECIPES
from tests.helpers import load

CLUSTERS = ["local", "2x8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("7x8+1x7", "1x4+1x2@h200"))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_picture(recipe: str, cluster: str, golden: Callable[[str, str], None]) -> None:
    text = drawn(rlflow.compile(load(f"recipe={recipe}"), cluster), 100)
    assert max(map(len, text.splitlines())) <= 100
    golden(f"plans/{recipe}-{cluster}.txt", text)


@pytest.mark.parametrize("width", [80, 120])
def test_other_widths_say_the_same(width: int) -> None:
    plan = rlflow.compile(load("recipe=grpo_32b"), "1x8+1x7")
    text = drawn(plan, width)
    assert max(map(len, text.splitlines())) <= min(width, WIDTH)
    facts = text[text.index("\nwhy") :].split()
    assert facts == drawn(plan, 100)[drawn(plan, 100).index("\nwhy") :].split()


def drawn(plan: Plan, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(render(plan, width=min(WIDTH, width)))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
