"""A browser for the pages of reports."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser import browser
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def picture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder for pictures: with ``--update-golden`` that of the documentation."""
    return ROOT / "docs" / "images" if request.config.getoption("--update-golden") else tmp_path
