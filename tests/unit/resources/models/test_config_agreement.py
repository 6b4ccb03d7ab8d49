"""The figures that a plan is made with are those of the model that is run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rlflow
from rlflow.errors import RecipeError
from rlflow.recipe import Model
from rlflow.runtime.prepare import resolve_models
from tests.conftest import CONFIG_DIR
from tests.unit.resources.models.test_architecture import CARDS, named
from tests.unit.resources.models.test_config import QWEN

CARD = "Qwen/Qwen2.5-7B-Instruct"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache of Hugging Face."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def policy(*overrides: str) -> Model:
    """Return the policy of a recipe with the card of Qwen2.5-7B-Instruct."""
    return rlflow.load(["recipe=grpo_7b", *overrides]).models["policy"]


def folder(at: Path, **changes: Any) -> Path:
    at.mkdir(parents=True, exist_ok=True)
    (at / "config.json").write_text(json.dumps({**QWEN, **changes}))
    return at


def test_the_model_of_the_card() -> None:
    model = policy()
    assert (model.path, model.architecture_of, model.architecture) == (CARD, CARD, named("qwen2_5_7b"))


def test_a_folder_with_the_same_figures(tmp_path: Path) -> None:
    """Another rope_theta changes neither memory nor time."""
    path = folder(tmp_path / "mine", rope_theta=5e6)
    assert policy(f"models.policy.path={path}").architecture == named("qwen2_5_7b")


def test_a_folder_with_other_figures(tmp_path: Path) -> None:
    path = folder(tmp_path / "mine", hidden_size=896, vocab_size=151936)
    with pytest.raises(RecipeError) as raised:
        policy(f"models.policy.path={path}")
    message = str(raised.value)
    assert message.startswith(f"models.policy.path: '{path}/config.json' has hidden_size 896, and the figures in ")
    assert f"those of '{CARD}', have 3584 (" in message
    assert "Fix: models.policy.architecture=null, which takes the figures of that file." in message
    taken = policy(f"models.policy.path={path}", "models.policy.architecture=null").architecture
    assert taken is not None
    assert taken.vocab_size == 151936


@pytest.mark.slow
def test_another_name_on_the_hub(hub: Path) -> None:
    name = "me/my-finetune"
    with pytest.raises(RecipeError) as raised:
        policy(f"models.policy.path={name}")
    assert str(raised.value) == (
        f"models.policy.path: '{name}' is not '{CARD}', whose figures models.policy.architecture has, and its own are "
        f"not on this machine.\n  Fix: model@models.policy=CARD (conf/model); `hf download {name} config.json` "
        f"and models.policy.architecture=null; or, if the figures are the same, models.policy.architecture_of={name}."
    )
    assert policy(f"models.policy.path={name}", f"models.policy.architecture_of={name}").path == name
    snapshot = folder(hub / "models--me--my-finetune" / "snapshots" / "abc")
    assert policy(f"models.policy.path={name}").path == name
    folder(snapshot, num_hidden_layers=24)
    with pytest.raises(RecipeError, match="has num_hidden_layers 24, and the figures in"):
        policy(f"models.policy.path={name}")


def test_another_card_is_chosen_as_the_message_says() -> None:
    model = policy("model@models.policy=qwen2_5_0_5b")
    assert (model.path, model.architecture_of) == ("Qwen/Qwen2.5-0.5B-Instruct",) * 2


def test_a_model_that_the_planner_does_not_know(tmp_path: Path) -> None:
    """A card says nothing of it; figures that are written by hand do."""
    path = folder(tmp_path / "mine", model_type="mamba")
    with pytest.raises(RecipeError, match="the planner does not know models of type 'mamba'"):
        policy(f"models.policy.path={path}")
    by_hand = policy(f"models.policy.path={path}", "models.policy.architecture_of=null")
    assert by_hand.architecture == named("qwen2_5_7b")


def test_a_folder_of_another_machine_is_checked_where_the_run_starts(tmp_path: Path) -> None:
    path = tmp_path / "models" / "mine"
    overrides = ["recipe=fake", f"models.policy.path={path}"]
    overrides += ["models.policy.random_weights=false", "models.policy.characters=null"]
    plan = rlflow.compile(rlflow.load(overrides, CONFIG_DIR), "1x1@cpu")
    planned = plan.recipe.models["policy"].architecture
    assert planned is not None

    def resolve() -> str | None:
        return resolve_models(plan, lambda base, name: pytest.fail(name))["policy"].path

    folder(path)
    with pytest.raises(RecipeError, match=r"models\.policy\.path: .* has model_type qwen2, and the figures in models"):
        resolve()
    figures = {name: value for name, value in vars(replace(planned)).items() if value is not None}
    (path / "config.json").write_text(json.dumps(figures))
    assert resolve() == str(path)


def test_every_card_says_whose_figures_it_has() -> None:
    for path in CARDS:
        card: Any = OmegaConf.load(path)
        assert card.path == card.architecture_of, path.stem
