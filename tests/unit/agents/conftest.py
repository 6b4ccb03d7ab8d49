"""Extras as pyproject.toml has them now: the installed metadata may be older."""

import tomllib

import pytest

from rlflow import extras
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def extras_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [f"{line}; extra == '{extra}'" for extra, lines in project.items() for line in lines]
    monkeypatch.setattr(extras, "requires", lambda name: lines)
