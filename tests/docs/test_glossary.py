"""docs/glossary.md explains words that the other pages use, each in a sentence or two with a link."""

import re

from tests.conftest import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [ROOT / "README.md", *(path for path in (ROOT / "docs").glob("*.md") if path != GLOSSARY)]
TERMS = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) (\[.+) \|$", GLOSSARY.read_text(), flags=re.MULTILINE)


def test_every_row_has_a_meaning_and_a_link() -> None:
    assert len(TERMS) == len(re.findall(r"^\| \*\*", GLOSSARY.read_text(), flags=re.MULTILINE)) > 50
    assert [term for term, meaning, _ in TERMS if len(meaning.split()) > 40 or meaning.count(". ") > 1] == []


def test_the_pages_use_every_term() -> None:
    text = " ".join(page.read_text().lower() for page in PAGES)
    assert [term for term, *_ in TERMS if not re.search(rf"\b{re.escape(term.lower())}", text)] == []


def test_every_term_is_explained_once() -> None:
    terms = [term for term, *_ in TERMS]
    assert len(terms) == len(set(terms))
