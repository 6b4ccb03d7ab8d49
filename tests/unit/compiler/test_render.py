"""The plan's picture for every recipe on several clusters."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

import rlflow
from rlflow.compiler.render import render
from tests.helpers import load
from tests.unit.compiler.test_plan import RECIPES

CLUSTERS = ["local", "2x8", pytest.param("7x8+1x7", marks=pytest.mark.slow), "1x4+1x2@h200"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_picture(recipe: str, cluster: str, golden: Callable[[str, str], None]) -> None:
    console = Console(width=100, file=io.StringIO(), highlight=False)
    console.print(render(rlflow.compile(load(f"recipe={recipe}"), cluster)))
    assert isinstance(console.file, io.StringIO)
    text = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
    assert max(map(len, text.splitlines())) <= 100
    golden(f"plans/{recipe}-{cluster}.txt", text)
