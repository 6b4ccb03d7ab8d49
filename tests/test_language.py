"""The project speaks plain English: what of that can be counted."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS_IN_A_PARAGRAPH = 90
LINES_OF_README = 250


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a page, without code, tables, lists and headings."""
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        lines = [line for line in block.strip().splitlines() if not line.startswith(("|", "#"))]
        if lines and not re.match(r"[-*>] |\d+\. ", lines[0]):
            yield " ".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paragraphs_are_short(page: Path) -> None:
    long = [text for text in paragraphs(page.read_text()) if len(text.split()) > WORDS_IN_A_PARAGRAPH]
    assert long == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES_OF_README
