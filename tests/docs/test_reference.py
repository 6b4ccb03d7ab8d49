"""docs/reference.md has every key of a recipe, each with a meaning, and is up to date."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from omegaconf import OmegaConf

import rlflow
from rlflow.nodes.base import KINDS
from tests import python_reference, reference
from tests.conftest import ROOT

KEYS = {key.path: key for table in reference.tables() for key in table.keys}


def test_every_key_has_a_meaning() -> None:
    assert [
        f"{table.heading}: {key.path}" for table in reference.tables() for key in table.keys if not key.meaning
    ] == []


def test_the_page_is_up_to_date() -> None:
    assert reference.PAGE.read_text() == reference.page(), "python -m tests.reference writes it anew"


def test_public_names_have_a_meaning() -> None:
    page = python_reference.page()
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []
    assert python_reference.PAGE.read_text() == page, "python -m tests.python_reference writes it anew"


def test_public_names_are_listed() -> None:
    page = python_reference.page()
    assert [name for name in rlflow.__all__ if f"### `rlflow.{name}`" not in page] == []


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("roles.ROLE.optimizer.learning_rate", ("number from 1e-12 to 1", "`1e-06`", "")),
        ("roles.ROLE.zero_stage", ("whole number from 0 to 3 or `auto`", "`auto`", "")),
        ("roles.ROLE.timeout_minutes", ("number from 0.001 to 10080", "`10`", "minutes")),
        ("roles.ROLE.lora.rank", ("whole number from 1", "`16`", "")),
        ("data.max_prompt_tokens", ("whole number from 1", "", "tokens")),
        ("data.overlong", ("`error`, `drop` or `truncate_left`", "`error`", "")),
        ("checkpoints.every", ("whole number from 1", "", "steps")),
        ("models.NAME.architecture.sliding_window", ("whole number from 1 or `null`", "`null`", "tokens")),
        ("cluster.gpus.KIND.memory_gb_s", ("number from 1e-09 to 1e+09 or `null`", "`null`", "GB/s")),
        ("tune", ("`true` or `false` or `adaptive`", "`false`", "")),
    ],
)
def test_rows_have_type_default_and_unit(path: str, row: tuple[str, str, str]) -> None:
    key = KEYS[path]
    assert (key.type, key.default, key.unit) == row


def paths(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in content.items():
        shown = {"models.": "NAME", "roles.": "ROLE", "evaluation.sets.": "NAME"}.get(prefix, name)
        if isinstance(value, Mapping) and shown not in ("options", "columns", "template_options"):
            yield from paths(value, f"{prefix}{shown}.")
        else:
            yield f"{prefix}{shown}"


def test_keys_of_recipes_are_listed() -> None:
    unlisted = []
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        content: Any = OmegaConf.to_container(OmegaConf.load(recipe))
        sections = {key: value for key, value in content.items() if key not in ("defaults", "graph")}
        unlisted += [f"{recipe.name}: {path}" for path in paths(sections) if path not in KEYS]
    assert unlisted == []


def test_every_kind_of_node_is_listed() -> None:
    headings = {table.heading for table in reference.tables()}
    shipped = [kind for kind, node in KINDS.items() if node.__module__.startswith("rlflow.")]
    assert len(shipped) > 20
    assert [kind for kind in shipped if f"### `{kind}`" not in headings] == []
