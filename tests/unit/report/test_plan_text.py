"""The plan's picture for every recipe on several clusters."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.report.console import WIDTH
from rlflow.report.plan_text import render
from tests.conftest import FEW, LARGE, NAMES
from tests.helpers import load

CLUSTERS = ["2x8", "7x8+1x7", "1x4+1x2@h200"]
# Tiny recipes are for one machine.
PICTURES = [(recipe, "local") for recipe in NAMES]
PICTURES += [
    (recipe, cluster)
    for recipe in NAMES
    if "tiny" not in recipe
    for cluster in ([LARGE[recipe]] if recipe in LARGE else CLUSTERS)
]


@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [
        pytest.param(recipe, cluster, marks=() if recipe in FEW and cluster in ("local", "2x8") else pytest.mark.slow)
        for recipe, cluster in PICTURES
    ],
)
def test_picture(recipe: str, cluster: str, golden: Callable[[str, str], None]) -> None:
    text = drawn(rlflow.compile(load(f"recipe={recipe}"), cluster), 100)
    assert max(map(len, text.splitlines())) <= 100
    golden(f"plans/{recipe}-{cluster}.txt", text)


@pytest.mark.slow
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
