"""The paths of models for workers that start in other folders."""

from pathlib import Path

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.runtime.prepare import resolve_models
from rlflow.runtime.protocols import Report
from tests.conftest import CONFIG_DIR
from tests.helpers import load


def resolved(path: str) -> str | None:
    pins = [f"models.policy.path='{path}'", "models.policy.random_weights=false", "models.policy.characters=null"]
    plan = rlflow.compile(load("recipe=fake", *pins, config_dir=CONFIG_DIR), "1x1@cpu")
    return resolve_models(plan, no_run)["policy"].path


def no_run(base: Plan, name: str) -> Report:
    raise AssertionError(name)


@pytest.mark.parametrize("path", ["models/mine", "./models/mine", "~/models/mine"])
def test_a_folder_is_absolute(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolved(path) == str(tmp_path / "models" / "mine")


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "./nothing"])
def test_all_else_stays_as_it_is(path: str) -> None:
    assert resolved(path) == path
