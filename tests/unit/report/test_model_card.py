"""Model cards: what they say, what they never say, and that the hub and transformers accept them."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.recipe import Recipe
from rlflow.report.model_card import CARD, ModelCards, model_card
from rlflow.runtime.protocols import Report
from tests.conftest import CONFIG_DIR, Typed
from tests.helpers import load

EVALUATIONS = [
    {"step": 0, "evaluation/reward": 0.125, "evaluation/hard/pass_at_4": 0.5},
    {"step": 50, "evaluation/reward": 0.25, "evaluation/hard/pass_at_4": 0.5},
    {"step": 100, "evaluation/reward": 0.75, "evaluation/hard/pass_at_4": 0.625},
]


def report_of(plan: Plan, **changes: Any) -> Report:
    report = Report(
        name=plan.recipe.name,
        fingerprint=plan.fingerprint,
        status="finished",
        directory="outputs/run",
        steps=100,
        seconds=1000.0,
        eval_before=0.125,
        eval_after=0.75,
        step={"predicted": 213.4, "measured": 220.6},
        memory={
            "host-0/0": {
                "update": {"predicted": 61.25, "measured": 58.5},
                "generate": {"predicted": 9, "measured": None},
            },
            "host-0/1": {"update": {"predicted": 60.0, "measured": 52.0}},
        },
        store={},
        warnings=(),
        models={"actor": "outputs/run/model/actor"},
    )
    return replace(report, **changes)


def card_of(recipe: Recipe, cluster: str = "local", role: str = "actor") -> str:
    plan = rlflow.compile(recipe, cluster)
    return model_card(plan, report_of(plan), role, EVALUATIONS)


def metadata(card: str) -> Mapping[str, Any]:
    """Return the metadata as the hub's own client reads them."""
    parsed: Mapping[str, Any] = ModelCard(card).data.to_dict()
    assert parsed == yaml.safe_load(card.split("---\n")[1])
    return parsed


def test_a_card(golden: Callable[[str, str], None]) -> None:
    card = card_of(load("recipe=grpo_lora_32b", "push_to_hub=ada/sums"), "1x2")
    assert f"trained with rlflow {rlflow.__version__}." in card
    golden("model_card.md", card.replace(f"rlflow {rlflow.__version__}", "rlflow VERSION"))
    assert metadata(card) == {
        "base_model": "Qwen/Qwen2.5-32B-Instruct",
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlflow"],
    }


def test_scores_are_those_of_the_first_and_the_last_evaluation() -> None:
    card = card_of(load("recipe=fake", config_dir=CONFIG_DIR))
    assert re.findall(r"^\|.*(?:after|reward`|pass_at).*", card, re.MULTILINE)[:3] == [
        "|  | after 0 steps | after 100 steps |",
        "| `reward` | 0.125 | 0.75 |",
        "| `hard/pass_at_4` | 0.5 | 0.625 |",
    ]


def test_without_evaluations_there_are_no_scores() -> None:
    plan = rlflow.compile(load("recipe=fake", config_dir=CONFIG_DIR), "local")
    assert "Scores" not in model_card(plan, report_of(plan), "actor", [])


def test_a_model_that_recipes_have_trained_names_them_and_where_they_started() -> None:
    """grpo_tiny starts from beginner_tiny, which starts from random weights."""
    card = card_of(load("recipe=grpo_tiny"))
    assert "| base model | random weights, " in card
    assert "| trained before by | the recipe `beginner_tiny` |" in card
    assert "| data | the function `rlflow.data.arithmetic:additions` |" in card
    assert metadata(card).keys() == {"library_name", "pipeline_tag", "tags"}


@pytest.mark.parametrize(
    ("recipe", "role", "loader", "task"),
    [
        ("rm_tiny", "reward", "AutoModelForSequenceClassification", "text-classification"),
        ("ppo_tiny", "critic", "AutoModelForTokenClassification", None),
        ("ppo_tiny", "actor", "AutoModelForCausalLM", "text-generation"),
        ("sft_tiny", "actor", "AutoModelForCausalLM", "text-generation"),
    ],
)
def test_each_head_has_its_class(recipe: str, role: str, loader: str, task: str | None) -> None:
    card = card_of(load(f"recipe={recipe}"), role=role)
    assert f"model = {loader}.from_pretrained(name)\n" in card
    assert metadata(card).get("pipeline_tag") == task


def test_a_card_has_no_paths_and_no_options(tmp_path: Path) -> None:
    recipe = load("recipe=fake", config_dir=CONFIG_DIR)
    folder = tmp_path / "marked-model"
    folder.mkdir()
    policy = replace(recipe.models["policy"], path=str(folder), random_weights=False, characters=None)
    hostile = "marked`|\n---\nlicense: mit\n---\n# marked.jsonl"
    for source in (str(tmp_path / "marked.jsonl"), hostile, "https://marked:marked@host/data"):
        data = replace(recipe.data, source=source, options={"key": "marked"})
        functions = {"exact": {"options": {}}, "length": {"options": {"buffer": 530917462835}}}
        rewards = {"node": "reward", "functions": functions}
        changed = replace(recipe, models={"policy": policy}, data=data, graph={**recipe.graph, "rewards": rewards})
        plan = replace(rlflow.compile(recipe, "local"), recipe=changed)
        card = model_card(plan, report_of(plan, directory=str(tmp_path)), "actor", EVALUATIONS)
        assert "marked" not in card
        assert "530917462835" not in card
        assert str(tmp_path) not in card
        assert "| data | local files |" in card
        assert "| base model | a local model, " in card
        assert metadata(card).keys() == {"library_name", "pipeline_tag", "tags"}


def test_what_a_recipe_names_is_code_in_one_cell_of_a_table() -> None:
    recipe = load("recipe=fake", config_dir=CONFIG_DIR)
    source = "module:a|b`<script>\n| c"
    plan = replace(rlflow.compile(recipe, "local"), recipe=replace(recipe, data=replace(recipe.data, source=source)))
    card = model_card(plan, report_of(plan), "actor", EVALUATIONS)
    assert r"| data | the function `module:a\|b'<script> \| c` |" in card.splitlines()


def test_it_is_written_beside_each_model(tmp_path: Path) -> None:
    plan = rlflow.compile(load("recipe=ppo_tiny"), "local")
    models = {role: str(tmp_path / "model" / role) for role in ("actor", "critic")}
    for folder in models.values():
        Path(folder).mkdir(parents=True)
    lines = [{"step": 1, "seconds": 1.0, "update/loss": 0.5}, *EVALUATIONS]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report, cards = report_of(plan, models=models), ModelCards()
    cards.started(plan, tmp_path, 0)
    cards.ended(report)
    for role, folder in models.items():
        assert (Path(folder) / CARD).read_text() == model_card(plan, report, role, EVALUATIONS)


@pytest.mark.slow
def test_the_code_of_the_card_loads_the_model(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text file of an exported model has a path of this machine."""
    lora = ("roles.actor.lora={rank: 4, alpha: 8}", "models.policy.architecture.head_dim=32")
    code, out, errors = typed("--config-dir", str(CONFIG_DIR), "recipe=real", "steps=1", *lora)
    assert code == 0, out + errors
    (folder,) = tmp_path.glob("outputs/*/*/model/actor")
    files = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {CARD, "config.json", "model.safetensors", "tokenizer.json", "adapter_config.json"} <= files.keys()
    assert [name for name, content in files.items() if str(tmp_path).encode() in content] == []
    (example,) = re.findall(r"```python\n(.*?)```", files[CARD].decode(), flags=re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["model"](**names["tokenizer"]("1+1=", return_tensors="pt")).logits.shape == (1, 4, 13)
