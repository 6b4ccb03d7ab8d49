"""A recipe file comes from anyone: nothing that it says may run a program or write outside the run's folder."""

import json
import re
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

import rlflow
from benchmarks.hostile_recipes import BOMBS, DEFAULTS, EFFECTS, HEAD, TARGETS, TEXTS, WAYS, cases, cost_of_bomb, effect
from benchmarks.hostile_recipes import write_files as written
from rlflow.cli import main
from rlflow.errors import FileError, RecipeError
from rlflow.recipe.compose import compose


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    EFFECTS.clear()
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("way", WAYS)
def test_no_file_reaches_hydras_own_configuration(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, words = WAYS[way]
    parts = written(tmp_path, files)
    arguments = [word.replace("PARTS", str(parts)) for word in words]
    config_dir = [] if "--config-path" in words else ["--config-dir", str(parts)]
    monkeypatch.setattr(sys, "argv", ["rlflow", *config_dir, *arguments, "dry_run=true"])
    code = main()
    said = capsys.readouterr().err
    assert EFFECTS == []
    assert not (tmp_path / "elsewhere").exists()
    assert code == 2, said
    assert said.startswith("FileError: parts/"), said
    assert "Fix: remove it" in said


@pytest.mark.slow
def test_no_file_names_a_function_for_hydra(tmp_path: Path) -> None:
    for target in TARGETS:
        parts = written(tmp_path, {"recipe/a.yaml": f"{HEAD}graph: {{rewards: {{_target_: {target}}}}}"})
        with pytest.raises(FileError) as raised:
            compose(["recipe=a"], parts)
        assert str(raised.value) == (
            "parts/recipe/a.yaml: 'graph.rewards._target_' would make Hydra call a function.\n"
            "  Fix: remove it; name your own code as package.module:name (docs/extending.md)."
        ), target


def test_a_plan_does_not_configure_hydra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = rlflow.compile(rlflow.load(["recipe=grpo_tiny"]), "local").to_dict()
    callbacks = {"x": {"_target_": "benchmarks.hostile_recipes.Callback"}}
    hostile = plan | {"hydra": {"callbacks": callbacks}, "recipe": plan["recipe"] | {"hydra": {"callbacks": callbacks}}}
    (tmp_path / "plan.json").write_text(json.dumps(hostile))
    monkeypatch.setattr(sys, "argv", ["rlflow", "plan=plan.json", "dry_run=true"])
    assert main() == 2
    assert EFFECTS == []
    assert capsys.readouterr().err.startswith("RecipeError: hydra: unknown key")


@pytest.mark.slow
def test_the_command_line_may_set_hydras_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["recipe=grpo_32b", "cluster=2x8", "dry_run=true", "hydra.run.dir=elsewhere"]
    monkeypatch.setattr(sys, "argv", ["rlflow", *words])
    assert main() == 0
    assert (tmp_path / "elsewhere" / "plan.json").exists()


def test_defaults_in_a_circle_are_named(tmp_path: Path) -> None:
    parts = written(tmp_path, {"algorithm/x.yaml": "defaults: [y]", "algorithm/y.yaml": "defaults: [/algorithm/x]"})
    with pytest.raises(RecipeError) as raised:
        compose(["recipe=grpo_tiny", "algorithm=x"], parts)
    circle = "algorithm/x -> algorithm/y -> algorithm/x"
    assert str(raised.value).startswith(f"recipe: defaults include each other: {circle}.\n  Fix: ")


def test_a_recipe_reads_no_secret_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference with a computed name is refused too. So is one on the command line, because plans are shared."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "# @package _global_\ndefaults: [grpo_tiny]\ndata: {name: oc, source: '${${.name}.env:HF_TOKEN}'}\n"
    )
    for overrides in ([f"recipe={file}"], ["recipe=grpo_tiny", "data.source='${oc.env:HF_TOKEN}'"]):
        with pytest.raises(RecipeError) as caught:
            rlflow.load(overrides)
        fact, fix = str(caught.value).split("\n")
        assert re.match(r"data\.source: '.*env:HF_TOKEN}' calls a function, but a recipe may only refer to its", fact)
        assert fix == '  Fix: write the value; data.source="$NAME" on the command line takes it from the environment.'


@pytest.mark.slow
def test_nothing_takes_effect(tmp_path: Path) -> None:
    names = [*(f"text: {name}" for name in TEXTS), *(f"defaults: {name}" for name in DEFAULTS)]
    effects = {name: effect(*cases()[name], tmp_path / str(index)) for index, name in enumerate(names)}
    assert {name: text for name, text in effects.items() if text} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_nothing(name: str, tmp_path: Path) -> None:
    message, seconds, mib = cost_of_bomb(BOMBS[name], tmp_path)
    assert message
    assert seconds < 0.5, "a tenth of a second on an idle machine"
    assert mib < 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file has no keys.\n  Fix: name a recipe to start from: defaults: [grpo_tiny, _self_]."),
        (
            "defaults: grpo_tiny",
            "expected a list of files under 'defaults', got 'grpo_tiny'.\n  Fix: write defaults: [NAME, _self_].",
        ),
        (
            "defaults: [5]",
            "its defaults have 5, which is no name of a file.\n  Fix: write names, as grpo_tiny or /data: gsm8k.",
        ),
        (
            "defaults: [_self_, grpo_tiny]\nsteps: 5",
            "its defaults have 'grpo_tiny' after _self_, so its keys replace those of this file.\n"
            "  Fix: put _self_ last.",
        ),
        (
            "defaults: [grpo_tiny, _self_]\ngraph: [1, 2]",
            "does not fit the files that it starts from (Cannot merge DictConfig with ListConfig full_key: "
            "object_type=dict).\n  Fix: write sections as keys with values, as they have them: {KEY: VALUE}.",
        ),
    ],
)
def test_a_mistake_in_a_file_names_the_file(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(FileError) as raised:
        compose(["recipe=mine.yaml"])
    assert str(raised.value).removeprefix(f"{tmp_path}/") == f"mine.yaml: {message}"


def test_an_entry_after_self_may_choose_another_option(tmp_path: Path) -> None:
    content = "defaults: [grpo_tiny, _self_, override /algorithm: grpo]\nsteps: 5"
    (tmp_path / "mine.yaml").write_text(content)
    assert compose(["recipe=mine.yaml"]).steps == 5


def test_a_file_that_starts_from_two_recipes_names_what_both_choose(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [grpo_tiny, ppo_tiny, _self_]")
    with pytest.raises(RecipeError, match="choose 'algorithm' more than once, the last time 'ppo'"):
        compose(["recipe=mine.yaml"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=1,000", "steps: a comma separates the values of a sweep, got 1,000.\n  Fix: -m for a sweep"),
        ("data.system_prompt=It's 5", "data.system_prompt: It's 5 cannot be read.\n  Fix: quote a text"),
        ("steps='1''2'", "steps: '1''2' cannot be read.\n  Fix: quote a text"),
        ("recipe=[]", "recipe: [] is not a name.\n  Fix: recipe=NAME"),
        ("cluster={}", "cluster: {} is not a name.\n  Fix: cluster=NAME"),
        ("recipe=./", "recipe: './' is a folder.\n  Fix: name a file in it"),
    ],
)
def test_a_value_that_hydra_cannot_read_is_named(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        compose([override])
    assert str(raised.value).startswith(message)
