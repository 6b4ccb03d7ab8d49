import json
import math
from pathlib import Path

import pytest

import rlflow
from rlflow.errors import RecipeError
from rlflow.recipe import Optimizer
from tests.conftest import CONFIG_DIR


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nope=1"], "nope: unknown key"),
        (["steps=0"], "steps: 0 is not valid"),
        (["seed=no"], "seed: 'no' is not valid"),
        (["roles.actor.engin=x"], "roles.actor.engin: unknown key"),
        (["roles.actor.optimizer={learning_rate: nan}"], "roles.actor.optimizer.learning_rate: nan is not valid"),
        (
            ["models.policy.path=x"],
            "models.policy: expected exactly one source of weights, got path and random_weights",
        ),
        (["models.policy.random_weights=false"], "models.policy: expected exactly one source of weights, got none"),
        (["models.policy.characters=null"], "models.policy.random_weights: also needs 'architecture', and either"),
        (["models.policy.tokenizer=bytes"], "models.policy.random_weights: also needs 'architecture', and either"),
        (
            ["models.policy.characters=null", "models.policy.tokenizer=bytes"],
            "models.policy.architecture.vocab_size: 13 is too small for the 265 tokens of tokenizer: bytes",
        ),
        (
            ["models.policy={path: x, tokenizer: bytes, random_weights: false}"],
            "models.policy.characters: has no effect on a model whose weights come from 'path'",
        ),
        (["data.source='${nope}'"], "data.source: '${nope}' refers to nothing: no 'nope'"),
        (["data.source=???"], "data.source: is missing"),
        (["models.policy={recipe: nope}"], "models.policy.recipe: no recipe 'nope'"),
        (
            ["models.policy.characters='0123456789+=abcdef'"],
            "models.policy.architecture.vocab_size: 13 is too small for",
        ),
        (["recipe=nope"], "recipe: no recipe 'nope'"),
        (["roles.actor"], "command line: "),
    ],
)
def test_what_is_wrong_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        rlflow.load(["recipe=fake", *overrides], CONFIG_DIR)
    assert str(raised.value).startswith(message)


def test_a_recipe_for_a_model_is_composed_in_its_turn() -> None:
    base = rlflow.load(["recipe=grpo_tiny", "seed=3"]).models["policy"].recipe
    assert base == rlflow.load(["recipe=beginner_tiny"])


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 0, 0.25),  # the first of four steps of warm-up
        ("constant", 3, 1.0),
        ("constant", 99, 1.0),
        ("linear", 4, 1.0),
        ("linear", 52, 0.5),  # half of the 96 steps behind the warm-up
        ("cosine", 52, 0.5),
        ("cosine", 28, (1 + math.cos(math.pi / 4)) / 2),
    ],
)
def test_learning_rate(schedule: str, step: int, expected: float) -> None:
    optimizer = Optimizer(learning_rate=1.0, schedule=schedule, warmup_steps=4)  # type: ignore[arg-type]
    assert optimizer.learning_rate_at(step, steps=100) == pytest.approx(expected)
    assert optimizer.learning_rate_at(-1, steps=100) == 0


def test_a_recipe_that_starts_from_itself(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "ring.yaml").write_text(
        "# @package _global_\ndefaults: [/algorithm: sft]\nname: ring\nmodels: {policy: {recipe: ring}}\n"
    )
    with pytest.raises(
        RecipeError, match=r"^models\.policy\.recipe\.models\.policy\.recipe: refers to itself: ring -> ring"
    ):
        rlflow.load(["recipe=ring"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nan", "1e3", "[1]", "a,b", "x=y", "it's\\", "~nobody-here", ""])
def test_the_recipe_of_a_model_is_a_name_whatever_hydra_reads_in_it(name: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(f"# @package _global_\ndefaults: [grpo_tiny]\nmodels: {{policy: {{recipe: {json.dumps(name)}}}}}\n")
    with pytest.raises(RecipeError) as raised:
        rlflow.load([f"recipe={own}"])
    assert str(raised.value).startswith(f"models.policy.recipe: no recipe '{name}'.")


def test_a_mistake_in_the_recipe_of_a_model_is_found_there(tmp_path: Path) -> None:
    base, own = tmp_path / "base.yaml", tmp_path / "own.yaml"
    base.write_text("# @package _global_\ndefaults: [grpo_tiny, _self_]\nsteps: 0\n")
    own.write_text(f"# @package _global_\ndefaults: [beginner_tiny, _self_]\nmodels: {{policy: {{recipe: {base}}}}}\n")
    with pytest.raises(RecipeError, match=r"^models\.policy\.recipe\.steps: "):
        rlflow.load([f"recipe={own}"])
