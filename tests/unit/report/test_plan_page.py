"""The plan as a page: it shows the figures of the plan, needs nothing from elsewhere, and a browser draws it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.report.plan_page import page_figures, plan_page
from tests.browser import drawn, needs_browser
from tests.helpers import load


@pytest.fixture(scope="module")
def plan() -> Plan:
    return rlflow.compile(load("recipe=ppo_7b"), "1x7+1x8")


def shown(page: str) -> Any:
    """Return the figures in the page."""
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


def test_the_figures_are_those_of_the_plan(plan: Plan) -> None:
    written, figures = json.loads(json.dumps(plan.to_dict())), shown(plan_page(plan))
    for node in figures["nodes"]:
        assert (node["start"], node["seconds"]) == tuple(
            written["nodes"][node["name"]][k] for k in ("start", "seconds")
        )
    for role, of_role in figures["roles"].items():
        memory = written["roles"][role]["memory_gib"]
        assert (of_role["phases"], of_role["peak_gib"]) == (memory["phases"], memory["peak_gib"])
        bundles = [bundle for worker in written["roles"][role]["workers"] for bundle in worker["bundles"]]
        assert sum(len(gpus) for gpus in of_role["workers"].values()) == len(bundles)
    for shown_one, written_one in zip(figures["alternatives"], written["alternatives"], strict=True):
        assert shown_one.items() >= written_one.items()
    assert [pool["gpus"] for pool in figures["pools"]] == [8, 7]
    assert {node["name"]: node["role"] for node in figures["nodes"]}["actor->rollout"] == "rollout"


def test_the_page_loads_nothing_and_no_text_ends_its_script(plan: Plan) -> None:
    page = plan_page(replace(plan, recipe=replace(plan.recipe, name="</script><img src=x>")))
    assert shown(page)["name"] == "</script><img src=x>"
    assert page.count("</script>") == page.count("<script")
    own = page[: page.index("application/json")] + page[page.index("const plan") :]
    assert not re.search(r"src=|url\(|@import|fetch\(|http|<link(?! rel=\"icon\" href=\"data:,\">)", own)
    assert "{{" not in page


def test_a_thousand_gpus_fit_in_a_small_page() -> None:
    assert len(plan_page(rlflow.compile(load("recipe=grpo_32b"), "128x8"))) < 2_000_000


def test_cpus_have_no_memory_of_gpus() -> None:
    figures = page_figures(rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu"))
    assert figures["verdict"] is None
    assert "least headroom" not in figures["summary"]


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_every_gpu_and_sorts_alternatives(plan: Plan, tmp_path: Path) -> None:
    page = plan_page(plan)
    before = drawn(page, tmp_path)
    assert before.count('class="gpu"') == 15
    assert f"{plan.recipe.name} on {plan.cluster.shape} <span" in before
    steps = [each.step_seconds for each in plan.prediction.alternatives]
    assert times(before) == pytest.approx(sorted(step or 1e9 for step in steps), rel=0.01)
    again = drawn(page, tmp_path, 'document.querySelectorAll("th button")[1].click();' * 2)
    assert times(again) == pytest.approx(sorted((step or 1e9 for step in steps), reverse=True), rel=0.01)


def times(page: str) -> list[float]:
    """Return the seconds in the table of alternatives."""
    cells = re.findall(r'<td class="number">(.*?)</td>', page)
    return [1e9 if cell == "does not fit" else float(cell.removesuffix(" s")) for cell in cells]
