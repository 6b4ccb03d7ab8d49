"""The plan as a page: it shows the figures of the plan, needs nothing from elsewhere, and a browser draws it."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from rich.console import Console

import rlflow
from rlflow.compiler.other_sizes import size_axes, size_points
from rlflow.compiler.plan import Plan
from rlflow.recipe.compose import load_cluster
from rlflow.report.formats import format_range, format_seconds
from rlflow.report.graph_drawing import draw_graph
from rlflow.report.plan_page import page_figures, plan_page
from rlflow.report.plan_text import render
from tests.browser import WIDTHS, assert_accessible, assert_fits_paper, assert_prints, needs_browser, open_page
from tests.helpers import load


@pytest.fixture(scope="module")
def plan() -> Plan:
    return rlflow.compile(load("recipe=ppo_7b"), "1x7+1x8")


def text_of(plan: Plan) -> str:
    """Return the plan as the console shows it."""
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render(plan))
    return console.export_text()


def figures_of(page: str) -> Any:
    """Return the figures in the page."""
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


def test_the_figures_are_those_of_the_plan(plan: Plan) -> None:
    written, figures = json.loads(json.dumps(plan.to_dict())), figures_of(plan_page(plan))
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
    assert [pool["gpus"] for pool in figures["pools"]] == [15]
    assert {node["name"]: node["role"] for node in figures["nodes"]}["actor->rollout"] == "rollout"


def test_the_page_loads_nothing_and_no_text_ends_its_script(plan: Plan) -> None:
    page = plan_page(replace(plan, recipe=replace(plan.recipe, name="</script><img src=x>")))
    assert figures_of(page)["name"] == "</script><img src=x>"
    assert page.count("</script>") == page.count("<script")
    own = page[: page.index("application/json")] + page[page.index("const plan") :]
    assert not re.search(
        r"src=|url\(|@import|fetch\(|https?:(?!//www.w3.org/2000/svg)|<link(?! rel=\"icon\" href=\"data:,\">)", own
    )
    assert "{{" not in page


@pytest.mark.slow
def test_a_thousand_gpus_fit_in_a_small_page() -> None:
    assert len(plan_page(rlflow.compile(load("recipe=grpo_32b"), "128x8"))) < 2_000_000


@pytest.mark.slow
def test_cpus_have_no_memory_of_gpus() -> None:
    plan = rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu")
    figures = page_figures(plan)
    assert figures["verdict"] is None
    assert "least headroom" not in figures["summary"]
    assert "tokens/s per CPU" in figures["summary"]
    assert "tokens/s/CPU" in text_of(plan)


def test_the_page_has_the_host_memory_and_the_data_of_the_console() -> None:
    plan = rlflow.compile(load("recipe=dpo_7b"), "1x1@h200")
    for kind in ("host memory", "data"):
        (line,) = page_figures(plan)["remarks"][kind]
        assert re.search(rf"^{kind} +{re.escape(line)} *$", text_of(plan), flags=re.MULTILINE)


@pytest.mark.slow
def test_a_price_has_the_unit_of_the_prices_of_the_cluster() -> None:
    cluster = load_cluster("1x8")
    cluster = replace(cluster, gpus={kind: replace(gpu, price_per_hour=2.0) for kind, gpu in cluster.gpus.items()})
    plan = rlflow.compile(load("recipe=grpo_7b"), cluster)
    assert f"price {plan.cost.price:.2f} in the currency of price_per_hour" in " ".join(text_of(plan).split())
    assert page_figures(plan)["summary"]["price, in the currency of price_per_hour"] == f"{plan.cost.price:.2f}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ((97.6, 72.2, 793.0), "97.6 s (72.2 s to 793 s)"),
        ((660.0, 480.0, 4000.0), "11.0 minutes (8.0 minutes to 1.1 hours)"),
        ((107634.0, 79649.0, 263704.0), "1.2 days (22.1 hours to 3.1 days)"),
    ],
)
def test_long_times_are_in_minutes_hours_or_days(seconds: tuple[float, float, float], text: str) -> None:
    assert format_range(seconds[0], seconds[1:]) == text


@pytest.mark.slow
def test_sizes_that_are_tight_say_why() -> None:
    sizes = page_figures(rlflow.compile(load("recipe=ppo_7b"), "1x7@l40s"))["sizes"]
    tight = [point["reason"] for point in sizes["points"] if point["summary"].get("verdict") == "TIGHT"]
    assert tight
    assert all(
        re.search(r"^critic needs \d+ GiB \(\d+ to \d+ within the error\) of \d+ GiB", reason) for reason in tight
    )
    assert not any(point["reason"] for point in sizes["points"] if point["summary"].get("verdict") == "FITS")


def test_lines_join_nodes_of_the_graph_to_their_inputs_and_pass_beside_boxes(plan: Plan) -> None:
    graph = draw_graph(plan)
    boxes = {box["name"]: box for box in graph["boxes"]}
    (update,) = [node for node in plan.graph.nodes if node.name == "update"]
    assert boxes["update"]["reads"] == list(dict.fromkeys(update.inputs.values()))
    assert boxes["actor->rollout"]["reads"] == ["update"]
    places = [(box["column"], box["row"]) for box in graph["boxes"]]
    assert len(set(places)) == len(places)
    for line in graph["lines"]:
        assert [column for column, _ in line] == list(range(line[0][0], line[-1][0] + 1))
        assert not set(line[1:-1]) & set(places), "a line passes beside boxes"
        first, last = (
            next(name for name, place in zip(boxes, places, strict=True) if place == end) for end in (line[0], line[-1])
        )
        assert first in boxes[last]["reads"]


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of the plan."""
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(plan_page(plan))
    return path


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_every_gpu_and_node(plan: Plan, file: Path, chromium: Browser) -> None:
    with open_page(chromium, file) as page:
        assert page.locator(".gpu").count() == 15
        assert page.locator("h1").inner_text() == f"{plan.recipe.name} on {plan.cluster.shape} FITS"
        assert page.locator("#graph rect").count() == len(plan.graph.nodes) + 2, "with the prompts and the weight sync"
        rows = page.locator("[data-node]")
        assert rows.count() == len(plan.prediction.nodes)
        critical = {name for name, time in plan.prediction.nodes.items() if time.critical}
        assert {row.get_attribute("data-node") for row in page.locator(".row.critical").all()} == critical
        assert page.locator("#step h3").all_inner_texts()[1].startswith("critic on 7 GPUs, idle for")
        assert_prints(page)


@pytest.mark.slow
@needs_browser
def test_alternatives_sort_by_click_and_by_keyboard(plan: Plan, file: Path, chromium: Browser) -> None:
    steps = [each.step_seconds or 1e9 for each in plan.prediction.alternatives]
    with open_page(chromium, file) as page:

        def cells() -> list[float]:
            texts = page.locator("#alternatives td.number").all_inner_texts()
            return [1e9 if text == "does not fit" else float(text.removesuffix(" s")) for text in texts]

        assert cells() == pytest.approx(sorted(steps), rel=0.01)
        heading = page.locator("#alternatives th", has_text="step")
        heading.locator("button").click()
        assert heading.get_attribute("aria-sort") == "descending"
        assert [step for step in cells() if step < 1e9] == pytest.approx(
            sorted((step for step in steps if step < 1e9), reverse=True), rel=0.01
        )
        page.keyboard.press("Enter")
        assert cells() == pytest.approx(sorted(steps), rel=0.01)
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Space")
        names = page.locator("#alternatives td:first-child").all_inner_texts()
        assert names == sorted(names)


@pytest.mark.slow
@needs_browser
def test_sliders_show_what_the_planner_says_of_these_sizes(plan: Plan, file: Path, chromium: Browser) -> None:
    with open_page(chromium, file) as page:
        figures = page.locator("#size-summary")
        assert format_seconds(plan.prediction.step_seconds) in figures.inner_text()
        assert page.locator("#own").is_disabled()
        page.get_by_label("Longest response, tokens").focus()
        page.keyboard.press("ArrowRight")
        page.get_by_label("Batch").focus()
        page.keyboard.press("Home")
        sizes = {"graph.rollouts.max_tokens": 4096, "data.batch_size": 512}
        assert page.locator("output").all_inner_texts() == [str(size) for size in sizes.values()]
        point = next(each for each in size_points(plan, size_axes(plan)) if each.sizes == tuple(sizes.values()))
        assert point.step_seconds is not None
        assert point.peak_gib is not None
        assert format_seconds(point.step_seconds) in figures.inner_text()
        assert f"{point.step_seconds / plan.prediction.step_seconds - 1:+.0%}" in figures.inner_text()
        for role, gib in point.peak_gib.items():
            assert f"{gib:.1f} GiB" in page.locator(f"[data-role={role}]").inner_text()
        page.locator("#own").click()
        assert format_seconds(plan.prediction.step_seconds) in figures.inner_text()


@pytest.mark.slow
@needs_browser
def test_the_page_fits_paper_and_is_light_there(tmp_path: Path, chromium: Browser) -> None:
    file = tmp_path / "plan.html"
    file.write_text(plan_page(rlflow.compile(load("recipe=ppo_7b"), "2x8")))
    with open_page(chromium, file, scheme="dark") as page:
        for details in page.locator("details").all():
            details.evaluate("each => { each.open = true; }")
        assert_fits_paper(page)


@pytest.mark.slow
@needs_browser
def test_the_page_is_accessible(file: Path, chromium: Browser) -> None:
    assert_accessible(chromium, file)


@pytest.mark.slow
@needs_browser
def test_a_thousand_gpus_are_drawn_within_a_second(tmp_path: Path, chromium: Browser) -> None:
    file = tmp_path / "plan.html"
    file.write_text(plan_page(rlflow.compile(load("recipe=grpo_32b"), "128x8")))
    assert file.stat().st_size < 2_000_000
    with chromium.new_context() as context:
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(file.as_uri())
        assert page.locator(".gpu").count() == 1024
        figures = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    assert 0 < figures["TaskDuration"] < 1, "seconds of CPU time"


@pytest.mark.slow
@needs_browser
def test_the_picture_of_the_documentation_is_small(chromium: Browser, tmp_path: Path, picture: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(plan_page(rlflow.compile(load("recipe=grpo_32b"), "2x8")))
    with open_page(chromium, file) as page:
        box = page.locator("#step").bounding_box()
        assert box is not None
        height = box["y"] + box["height"] + 20
        page.screenshot(
            path=picture / "plan.png",
            full_page=True,
            clip={"x": 0, "y": 0, "width": WIDTHS["desktop"], "height": height},
        )
        page.locator("#sizes-section").screenshot(path=picture / "sizes.png")
    assert (picture / "plan.png").stat().st_size < 300_000
