"""The paths of models for workers that start in other folders."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.engines.causal_lm import new_tokenizers
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


def test_a_cached_model_has_the_tokenizer_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was trained with other tokens is not used again."""
    monkeypatch.setenv("RLFLOW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    trained: list[str] = []

    def train(base: Plan, name: str) -> Any:
        trained.append(name)
        return SimpleNamespace(status="finished", models={"actor": tmp_path / "model"})

    plan = rlflow.compile(load("recipe=grpo_tiny"), "1x1@cpu")
    paths = {resolve_models(plan, train)["policy"].path for _ in range(2)}
    monkeypatch.setattr(new_tokenizers, "END_TOKEN", "<|stop|>")
    paths.add(resolve_models(plan, train)["policy"].path)
    assert (trained, len(paths)) == (["policy"] * 2, 2)


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "./nothing"])
def test_all_else_stays_as_it_is(path: str) -> None:
    assert resolved(path) == path
