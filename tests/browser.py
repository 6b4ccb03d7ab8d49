"""A browser for tests of pages, if one is installed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request, sync_playwright

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium")
WIDTHS = {"desktop": 1240, "phone": 390}
Scheme = Literal["light", "dark"]


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a browser without windows."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def open_page(browser: Browser, file: Path, width: int = WIDTHS["desktop"], scheme: Scheme = "light") -> Iterator[Page]:
    """Yield a file as a page. At the end, check that it wrote nothing to its console and loaded nothing else."""
    messages: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()

    def note(message: object) -> None:
        messages.append(str(message))

    def note_request(request: Request) -> None:
        if request.url not in (file.as_uri(), "data:,"):
            note(request.url)

    page.on("console", note)
    page.on("pageerror", note)
    page.on("request", note_request)
    page.goto(file.as_uri())
    yield page
    context.close()
    assert messages == []


def assert_accessible(browser: Browser, file: Path) -> None:
    """Check that axe-core finds no fault in light and dark, and that a phone need not scroll sideways."""
    schemes: tuple[Scheme, ...] = ("light", "dark")
    for scheme in schemes:
        with open_page(browser, file, scheme=scheme) as page:
            for details in page.locator("details").all():
                details.evaluate("each => { each.open = true; }")
            found = Axe().run(page).response["violations"]
            assert [(each["impact"], each["help"], each["nodes"][0]["html"]) for each in found] == []
    with open_page(browser, file, WIDTHS["phone"]) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS["phone"]


def assert_prints(page: Page) -> None:
    """Check that the page can be printed, and that elements for screens alone are left out."""
    page.emulate_media(media="print")
    assert [each.is_visible() for each in page.locator(".screen").all()] == [False] * page.locator(".screen").count()
    assert page.locator("h1").is_visible()
    assert page.pdf().startswith(b"%PDF")


def assert_fits_paper(page: Page) -> None:
    """Check that the page is light on paper, and that no element is wider than a sheet of A4 within its margins."""
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 900})
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    wide = """[...document.querySelectorAll("main *, header *")].filter(each => each.getClientRects().length
      && (each.getBoundingClientRect().right > innerWidth + 1 || getComputedStyle(each).overflowX === "auto"))"""
    assert page.evaluate(f"{wide}.map(each => each.outerHTML.slice(0, 80))") == []
