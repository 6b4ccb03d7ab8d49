"""docs/coming-from.md names options that exist: rlflow's in the reference, TRL's in the installed library."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests import reference
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
NAMES = PAGE.partition("\n## Names\n")[2].partition("\n## ")[0]
ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split(" | ")]
    for row in re.findall(r"^\|.*\|$", NAMES, flags=re.MULTILINE)
    if not row.startswith(("| what", "|---"))
]


def test_rlflow_has_the_options_of_its_column() -> None:
    tables = list(reference.tables())
    paths = {key.path for table in tables for key in table.keys}
    nodes = {table.heading.strip("# `") for table in tables}
    for _, own, *_ in ROWS:
        for name in own:
            name = re.sub(r"^roles\.\w+", "roles.ROLE", re.sub(r"^models\.\w+", "models.NAME", name.partition("=")[0]))
            option = re.sub(r"^graph\.\w+\.", "", name)
            assert name in paths or option in paths or name in nodes or name.startswith("defaults"), name


def test_trl_has_the_options_of_its_column() -> None:
    """The names are read from the sources, because importing them takes long."""
    found = importlib.util.find_spec("trl"), importlib.util.find_spec("transformers")
    if None in found:
        pytest.skip("trl is not installed")
    trl, transformers = (Path(str(spec.origin)).parent for spec in found if spec)
    files = (
        *(trl / "trainer" / f"{name}_config.py" for name in ("base", "grpo", "model", "sft")),
        trl / "experimental" / "online_dpo" / "online_dpo_config.py",
        *(trl / "scripts" / "utils.py", transformers / "training_args.py"),
    )
    known = {name for file in files for name in re.findall(r"^    (\w+): ", file.read_text(), flags=re.MULTILINE)}
    names = {name for row in ROWS for name in row[3]} - {"reward_funcs"}
    assert len(names) > 30
    assert sorted(names - known) == []


def test_every_row_has_an_option_of_rlflow_and_of_another_library() -> None:
    assert len(ROWS) > 40
    assert [row for row in ROWS if len(row) != 5 or not row[1] or not any(row[2:])] == []
