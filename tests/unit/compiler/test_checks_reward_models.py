"""Models that give rewards: what is no reward model is told before anything runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import rlflow
from rlflow.compiler.wire import wire
from rlflow.errors import RecipeError
from rlflow.recipe import Model, Recipe
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.preflight import check_reward_folders
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import MODEL, load

FIX = "a model that reward_model_update has trained, as {recipe: rm_tiny}"


def judged_by(model: Model) -> Recipe:
    recipe = load("recipe=reward_model", config_dir=CONFIG_DIR)
    return replace(recipe, models={**recipe.models, "judge": model})


def folder(path: Path, kind: str) -> Model:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": [kind]}))
    return Model(path=str(path), dtype="float32", architecture=MODEL.architecture)


def test_a_recipe_that_makes_none() -> None:
    with pytest.raises(RecipeError) as raised:
        rlflow.compile(judged_by(Model(recipe=load("recipe=sft_tiny"))), "local")
    fact = "models.judge.recipe: 'sft_tiny' does not train a reward model"
    assert str(raised.value) == f"{fact}.\n  Fix: {FIX}."


def test_random_weights() -> None:
    with pytest.raises(RecipeError) as raised:
        rlflow.compile(judged_by(MODEL), "local")
    assert str(raised.value) == f"models.judge.random_weights: a reward model needs a trained head.\n  Fix: {FIX}."


def test_a_folder_with_a_language_model(tmp_path: Path) -> None:
    recipe = judged_by(folder(tmp_path / "model", "Qwen3ForCausalLM"))
    plan = rlflow.compile(recipe, "local")
    with pytest.raises(RecipeError) as raised:
        check_reward_folders(plan.recipe, plan.graph)
    fact = f"models.judge.path: '{tmp_path}/model' is not a reward model: its config.json names Qwen3ForCausalLM"
    assert str(raised.value) == f"{fact}.\n  Fix: {FIX}."


def test_a_folder_with_a_reward_model(tmp_path: Path) -> None:
    recipe = judged_by(folder(tmp_path / "model", "Qwen3ForSequenceClassification"))
    check_reward_folders(recipe, wire(recipe))
    check_reward_folders(recipe, wire(load("recipe=rm_tiny")))


def test_a_different_tokenizer_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    """The check covers a model that another recipe has yet to train."""
    judge = load("recipe=rm_tiny")
    judge = replace(judge, models={"policy": replace(MODEL, characters="+=0123456789")})
    with pytest.raises(RecipeError, match=r"^roles\.reward\.model: 'judge' reads the tokens of 'policy', where"):
        run(rlflow.compile(judged_by(Model(recipe=judge)), "local"), tmp_path / "run", LocalRuntime())
    assert not (tmp_path / "run").exists()
