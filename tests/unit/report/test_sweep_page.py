"""The plans of a sweep as a page: figures of the plans, the frontier, and clusters that are too small."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.recipe.compose import load_cluster
from rlflow.report.plan_page import write_dry_run
from rlflow.report.ranking import SweepOutcome
from rlflow.report.sweep import sweep_figures, write_sweep_page
from rlflow.resources.cluster import Cluster
from tests.browser import WIDTHS, Scheme, assert_accessible, assert_fits_paper, assert_prints, needs_browser, open_page
from tests.helpers import load

SHAPES = ("1x4", "1x8", "2x8")


def priced(shape: str, price: float | None) -> Cluster:
    cluster = load_cluster(shape)
    return replace(cluster, gpus={kind: replace(gpu, price_per_hour=price) for kind, gpu in cluster.gpus.items()})


def plans(price: float | None = 2.5) -> dict[str, Plan]:
    return {shape: rlflow.compile(load("recipe=grpo_7b"), priced(shape, price)) for shape in SHAPES}


def outcomes_of(found: dict[str, Plan], folder: Path) -> list[SweepOutcome]:
    """Return the outcomes of a sweep over clusters. The first cluster is too small."""
    small = SweepOutcome(("recipe=grpo_7b", "cluster=1x1"), None, reason="roles: nothing fits 1x1")
    fits = [
        SweepOutcome(("recipe=grpo_7b", f"cluster={shape}"), plan, folder=folder / str(number))
        for number, (shape, plan) in enumerate(found.items(), 1)
    ]
    return [small, *fits]


@pytest.fixture(scope="module")
def found() -> dict[str, Plan]:
    return plans()


def by_name(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {plan["label"].removeprefix("cluster="): plan for plan in figures["plans"]}


def test_the_figures_are_those_of_the_plans(found: dict[str, Plan], tmp_path: Path) -> None:
    figures = sweep_figures(outcomes_of(found, tmp_path), tmp_path)
    assert figures["shared"] == ["recipe=grpo_7b"]
    assert figures["rejected"] == [{"label": "cluster=1x1", "reason": "roles: nothing fits 1x1"}]
    for number, (shape, plan) in enumerate(found.items(), 1):
        row = by_name(figures)[shape]
        assert row["page"] == f"{number}/plan.html"
        assert (row["step_seconds"], row["gpu_hours"]) == (plan.prediction.step_seconds, plan.cost.gpu_hours)
        hosts, gpus = map(int, shape.split("x"))
        assert row["gpus"] == hosts * gpus
        assert row["price"] == pytest.approx(2.5 * hosts * gpus * plan.cost.hours)


@pytest.mark.slow
def test_a_plan_that_takes_longer_and_costs_more_is_not_on_the_frontier(tmp_path: Path) -> None:
    found = plans(price=None)
    slow = rlflow.compile(load("recipe=grpo_7b", "roles.actor.offload=optimizer"), priced("1x8", None))
    outcomes = outcomes_of(found | {"slow": slow}, tmp_path)
    figures = by_name(sweep_figures(outcomes, tmp_path))
    assert slow.cost.hours > found["1x8"].cost.hours
    assert slow.cost.gpu_hours > found["1x8"].cost.gpu_hours
    assert not figures["slow"]["frontier"]
    # No plan beats the fastest or the cheapest one.
    for least in ("hours", "gpu_hours"):
        best = min(figures.values(), key=lambda row: row[least])
        assert best["frontier"]
    assert sweep_figures(outcomes, tmp_path)["cost"] == "GPU-hours"


def test_a_sweep_without_dry_runs_has_no_page(found: dict[str, Plan]) -> None:
    assert write_sweep_page([SweepOutcome((f"cluster={shape}",), plan) for shape, plan in found.items()]) is None


def test_the_page_of_cpus_counts_cpus_and_leaves_out_that_all_are_dry_runs(tmp_path: Path) -> None:
    recipe = load("recipe=grpo_tiny")
    outcomes = [
        SweepOutcome((f"cluster={shape}", "dry_run=True"), rlflow.compile(recipe, shape))
        for shape in ("1x1@cpu", "1x2@cpu")
    ]
    figures = sweep_figures(outcomes, tmp_path)
    assert figures["shared"] == []
    assert (figures["unit"], figures["cost"]) == ("CPU", "CPU-hours")


@pytest.fixture(scope="module")
def crowded(found: dict[str, Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of many plans that are almost alike, with long names."""
    folder = tmp_path_factory.mktemp("sweep")
    outcomes = [
        SweepOutcome(
            (f"recipe=grpo_7b_{name}", f"cluster={shape}@h100_80gb", "dry_run=True"), plan, folder=folder / shape
        )
        for shape, plan in found.items()
        for name in ("first", "second", "third", "fourth")
    ]
    file = write_sweep_page(outcomes)
    assert file is not None
    return file


OVERLAPS = """() => [...document.querySelectorAll(".chart")].flatMap(chart => {
  const area = chart.querySelector(".u-over").getBoundingClientRect();
  const boxes = [...chart.querySelectorAll(".name:not(.crowded)")].map(each =>
    [each.textContent, each.getBoundingClientRect()]);
  const outside = boxes.filter(([, box]) => box.left < area.left - 1 || box.right > area.right + 1
    || box.top < area.top - 1 || box.bottom > area.bottom + 1);
  const points = [...chart.querySelectorAll(".point")].map(each => ["point", each.getBoundingClientRect()]);
  const covered = boxes.flatMap(([name, a], n) => [...boxes.slice(n + 1), ...points].filter(([, b]) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom).map(([other]) => [name, other]));
  return [...outside.map(([name]) => name), ...covered];
})"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS.values())
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_in_charts_cover_nothing(crowded: Path, chromium: Browser, width: int, scheme: Scheme) -> None:
    with open_page(chromium, crowded, width, scheme) as page:
        charts = page.locator(".chart")
        for chart in charts.all():
            assert chart.locator(".point").count() == 12
            assert chart.locator(".name:not(.crowded)").count() >= 3
        assert page.evaluate(OVERLAPS) == []
        hidden = charts.first.locator(".name.crowded").first
        assert not hidden.is_visible()
        hidden.locator("xpath=preceding-sibling::*[1]").hover(force=True)
        assert charts.first.locator(".name.crowded:visible").count() == 1


@pytest.mark.slow
@needs_browser
def test_plans_on_the_frontier_are_in_front(crowded: Path, chromium: Browser) -> None:
    with open_page(chromium, crowded) as page:
        at = "box => document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2).className"
        page.locator("#charts").scroll_into_view_if_needed()
        point = page.locator(".point.frontier").first
        point.scroll_into_view_if_needed()
        assert page.evaluate(at, point.bounding_box()) == "point frontier"


@pytest.mark.slow
@needs_browser
def test_the_page_fits_paper_and_is_light_there(crowded: Path, chromium: Browser) -> None:
    with open_page(chromium, crowded, scheme="dark") as page:
        drawing = "document.querySelector('canvas').toDataURL()"
        dark = page.evaluate(drawing)
        assert_fits_paper(page)
        light = page.evaluate(drawing)
    with open_page(chromium, crowded) as page:
        assert page.evaluate(drawing) == light != dark


@pytest.mark.slow
@needs_browser
def test_a_browser_compares_plans_and_opens_them(
    found: dict[str, Plan], tmp_path: Path, chromium: Browser, picture: Path
) -> None:
    outcomes = outcomes_of(found, tmp_path)
    for outcome in outcomes[1:]:
        assert outcome.plan is not None
        assert outcome.folder is not None
        write_dry_run(outcome.plan, outcome.folder)
    file = write_sweep_page(outcomes)
    assert file == tmp_path / "plans.html"
    with open_page(chromium, file) as page:
        names = page.locator("#plans td:first-child")
        assert names.all_inner_texts() == ["cluster=2x8", "cluster=1x8", "cluster=1x4"]
        page.get_by_role("button", name="GPU-hours").click()
        hours = {f"cluster={shape}": plan.cost.gpu_hours for shape, plan in found.items()}
        assert names.all_inner_texts() == sorted(hours, key=lambda name: hours[name])
        page.keyboard.press("Enter")
        assert names.all_inner_texts() == sorted(hours, key=lambda name: -hours[name])
        assert page.locator("#rejected").inner_text().split("\t") == ["cluster=1x1", "roles: nothing fits 1x1"]
        names_of_charts = [each.get_attribute("aria-label") or "" for each in page.locator("canvas").all()]
        headings = ["Hours of the run", "Step, s", "GPU-hours of the run", "Price of the run"]
        assert [name.split(" by ")[0] for name in names_of_charts] == headings
        step = found["1x4"].prediction.step_seconds
        assert f"cluster=1x4: 4, {float(f'{step:.3g}'):g}" in names_of_charts[1]
        assert_prints(page)
        page.emulate_media(media="screen")
        page.locator("h1").click()
        page.screenshot(path=picture / "plans.png", full_page=True)
    assert_accessible(chromium, file)
    context = chromium.new_context()
    page = context.new_page()
    page.goto(file.as_uri())
    page.get_by_role("link", name="cluster=1x8").click()
    assert page.title() == f"grpo_7b on {found['1x8'].cluster.shape}"
    context.close()
