"""Each promise of docs/reliability.md names a test, and each test that it names exists."""

import re

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text("utf-8")
FILES = list((ROOT / "tests").rglob("test_*.py"))
FUNCTIONS = {name for path in FILES for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)}


def test_each_test_that_is_named_exists() -> None:
    existing = FUNCTIONS | {path.name for path in FILES} | {path.relative_to(ROOT).as_posix() for path in FILES}
    named = set(re.findall(r"`((?:tests/[\w/]+/)?test_\w+(?:\.py)?)`", PAGE))
    assert len(named) > 50
    assert named <= existing


def test_each_row_of_a_table_names_a_test() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()[2:]]
    assert len(rows) > 40
    unnamed = [row for row in rows if not re.search(r"test_\w+|\| the same \|$", row)]
    assert not unnamed
