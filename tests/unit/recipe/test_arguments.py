"""The words that a person types, and what Hydra gets of them."""

import re
from pathlib import Path

import pytest

import rlflow
from rlflow.cli import SUBCOMMANDS
from rlflow.errors import RecipeError
from rlflow.recipe import Recipe
from rlflow.recipe.arguments import help_text, hydra_arguments

MINE = "# My own run.\ndefaults:\n  - grpo_tiny\n  - _self_\nname: mine\nsteps: 3\n"


def test_keys_of_the_recipe_may_be_new_and_groups_may_not() -> None:
    given = [
        "seed=1",
        "roles.actor.gpus=4",
        "recipe=x",
        "cluster=2x8",
        "hydra.run.dir=x",
        "+a=1",
        "~b",
        "data/x=y",
        "-m",
    ]
    expected = ["++seed=1", "++roles.actor.gpus=4", *given[2:]]
    assert hydra_arguments(given) == expected


def test_keys_below_a_group_of_the_same_name_stay_free() -> None:
    assert hydra_arguments(["data.batch_size=3", "data=gsm8k"]) == ["++data.batch_size=3", "data=gsm8k"]


@pytest.mark.parametrize("key", ["lr", "learning_rate"])
def test_short_keys_set_the_learning_rate_of_the_actor(key: str) -> None:
    optimizer = rlflow.load([f"{key}=0.25"]).roles["actor"].optimizer
    assert optimizer is not None
    assert optimizer.learning_rate == 0.25


def test_n_is_the_size_of_a_group() -> None:
    assert rlflow.load(["n=3"]).graph["rollouts"]["group_size"] == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch_size=3"], "batch_size: unknown key.\n  Known: .*\n  Fix: did you mean data.batch_size?"),
        (["recipe=rm_tiny", "lr=1"], "roles.actor: the recipe has no role 'actor'.\n  Known: reward."),
        (["roles.actr.gpus=1"], "roles.actr: the recipe has no role 'actr'.\n.*\n  Fix: did you mean 'actor'?"),
        (["graph.rewads.function=x"], "graph.rewads: the recipe has no node 'rewads'.\n.*\n  Fix: did you mean 'rewa"),
        (["recipe=7"], "recipe: no recipe '7'.\n"),
        (["recipe="], "recipe: no recipe ''.\n"),
        (["cluster=16"], "cluster: '16' is neither a file in conf/cluster nor a shape.\n"),
        (["cluster=null"], "cluster: no cluster 'null'.\n"),
        (["cluster=1x8@a100"], "cluster: no gpu 'a100'.\n.*\n  Fix: did you mean 'a100_40gb' or 'a100_80gb'?"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_hints(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        rlflow.load(overrides)
    assert re.match(re.escape(message).replace(r"\.\*", ".*").replace("\\\n", "\n"), str(raised.value)), raised.value


def test_the_only_kind_of_gpu_that_begins_so_is_meant(tmp_path: Path) -> None:
    assert hydra_arguments(["cluster=7x8@h100+1x7@h200,1x1@a100"]) == ["cluster=7x8@h100_80gb+1x7@h200,1x1@a100"]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "h100.yaml").touch()
    assert hydra_arguments(["cluster=2x8@h100"], tmp_path) == ["cluster=2x8@h100"]


def loaded(*overrides: str) -> Recipe:
    return rlflow.load(overrides)


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["runs/mine.yaml", "./runs/mine.yaml", "runs/mine", "{folder}/runs/mine.yaml"])
def test_a_recipe_is_given_by_its_path_from_anywhere(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hydra of 'mine'"  # no path is strange
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "mine.yaml").write_text(MINE)
    monkeypatch.chdir(folder)
    recipe = loaded(f"recipe={typed.format(folder=folder)}", "seed=5")
    assert (recipe.name, recipe.steps, recipe.seed) == ("mine", 3, 5)
    assert recipe.roles == loaded("recipe=grpo_tiny").roles, "its defaults are found as among the recipes"


def test_a_recipe_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    assert loaded("recipe=mine.yaml").name == "mine"
    with pytest.raises(RecipeError) as raised:
        loaded("recipe=mein.yaml")
    assert str(raised.value) == ("recipe: the file 'mein.yaml' does not exist.\n  Fix: did you mean 'mine.yaml'?")


def test_a_recipe_given_by_its_path_is_vetted(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"{MINE}hydra: {{run: {{dir: /tmp/elsewhere}}}}\n")
    with pytest.raises(RecipeError, match="sets 'hydra', which belongs to Hydra"):
        loaded(f"recipe={tmp_path}/mine.yaml")


def test_a_name_with_a_slash_below_the_users_own_folder(tmp_path: Path) -> None:
    (tmp_path / "recipe" / "sub").mkdir(parents=True)
    (tmp_path / "recipe" / "sub" / "mine.yaml").write_text(f"# @package _global_\n{MINE.replace('- g', '- /recipe/g')}")
    assert rlflow.load(["recipe=sub/mine"], tmp_path).name == "mine"


def test_more_steps_stay_a_text() -> None:
    assert hydra_arguments(["steps=+100"]) == ["++steps='+100'"]


def test_shell_completion_says_what_it_needs() -> None:
    assert hydra_arguments(["-sc", "install=bash"]) == ["-sc", "install=bash"]
    with pytest.raises(RecipeError, match="--shell-completion: is incomplete"):
        hydra_arguments(["--shell-completion"])


def test_help_is_one_screen_of_commands_that_can_be_typed() -> None:
    lines = help_text().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    commands = [line.split("  ")[1].split() for line in lines if re.match(r"  (rlflow|python)", line)]
    assert len(commands) == 9
    for _, *words in (command for command in commands if command[0] == "rlflow"):
        typed = [word for word in words if not re.search("FOLDER|path/to", word)]
        assert len(hydra_arguments(typed)) == len(typed)


def test_help_names_every_subcommand() -> None:
    table = help_text().partition("Commands")[2].partition("Recipes")[0]
    assert all(re.search(rf"  {name} ", table) for name in SUBCOMMANDS)
