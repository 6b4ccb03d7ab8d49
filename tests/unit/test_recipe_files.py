"""A recipe file comes from anyone: nothing that it says may run a program or write outside the run's folder."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

import rlflow
from rlflow.cli import main
from rlflow.compose import compose
from rlflow.errors import FileError, RecipeError
from tests.unit.hostile import EFFECTS

HEAD = "# @package _global_\ndefaults: [grpo_tiny, _self_]\n"
CALLBACKS = "{x: {_target_: tests.unit.hostile.Callback}}"

# Each way into Hydra's configuration: the files of a folder given by --config-dir, and the words on the command line.
WAYS: dict[str, tuple[dict[str, str], Sequence[str]]] = {
    "key": ({"recipe/a.yaml": f"{HEAD}hydra: {{callbacks: {CALLBACKS}}}"}, ["recipe=a"]),
    "escaped key": ({"recipe/a.yaml": f'{HEAD}"hy\\x64ra": {{callbacks: {CALLBACKS}}}'}, ["recipe=a"]),
    "merged key": (
        {"recipe/a.yaml": f"{HEAD}x: &x {{hydra: {{callbacks: {CALLBACKS}}}}}\n<<: *x"},
        ["recipe=a"],
    ),
    "run folder": ({"recipe/a.yaml": f"{HEAD}hydra: {{run: {{dir: elsewhere}}}}"}, ["recipe=a"]),
    "dotted key": ({"recipe/a.yaml": f"{HEAD}hydra.run.dir: elsewhere"}, ["recipe=a"]),
    "search path": ({"recipe/a.yaml": f"{HEAD}hydra: {{searchpath: ['pkg://tests']}}"}, ["recipe=a"]),
    "launcher": (
        {"recipe/a.yaml": f"{HEAD}hydra: {{launcher: {{_target_: tests.unit.hostile.Callback}}}}"},
        ["-m", "recipe=a", "seed=1,2"],
    ),
    "package header": (
        {"recipe/a.yaml": f"# @package hydra\ncallbacks: {CALLBACKS}"},
        ["recipe=a"],
    ),
    "package header below": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, b]",
            "recipe/b.yaml": "# @package hydra.callbacks.x\n_target_: tests.unit.hostile.Callback",
        },
        ["recipe=a"],
    ),
    "package of a default": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, /extra@hydra.callbacks.x: b]",
            "extra/b.yaml": "_target_: tests.unit.hostile.Callback",
        },
        ["recipe=a"],
    ),
    "absolute package of a default": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, /extra/b@_global_.hydra.callbacks.x]",
            "extra/b.yaml": "_target_: tests.unit.hostile.Callback",
        },
        ["recipe=a"],
    ),
    "group": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, /hydra/callbacks: b]",
            "hydra/callbacks/b.yaml": CALLBACKS,
        },
        ["recipe=a"],
    ),
    "group with a package": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, /hydra/callbacks@hydra.callbacks: b]",
            "hydra/callbacks/b.yaml": CALLBACKS,
        },
        ["recipe=a"],
    ),
    "override": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, override /hydra/callbacks: b]",
            "hydra/callbacks/b.yaml": CALLBACKS,
        },
        ["recipe=a"],
    ),
    "optional override of a launcher": (
        {"recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, optional override hydra/launcher: joblib]"},
        ["recipe=a"],
    ),
    "file of Hydra's group": ({"hydra/callbacks/b.yaml": CALLBACKS}, ["+hydra/callbacks=b"]),
    "path into Hydra's group": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, /recipe: ../hydra/callbacks/b]",
            "hydra/callbacks/b.yaml": f"# @package _global_\nseed: 1\nx: {CALLBACKS}",
        },
        ["recipe=grpo_tiny", "+recipe@_global_=../hydra/callbacks/b"],
    ),
    "another group": (
        {"algorithm/b.yaml": f"# @package _global_\nhydra: {{callbacks: {CALLBACKS}}}"},
        ["recipe=grpo_tiny", "algorithm=b"],
    ),
    "cluster": (
        {"cluster/b.yaml": f"# @package _global_\nhydra: {{callbacks: {CALLBACKS}}}"},
        ["recipe=grpo_tiny", "cluster=b"],
    ),
    "primary file": ({"mine.yaml": f"hydra: {{callbacks: {CALLBACKS}}}"}, ["--config-name", "mine"]),
    "file called config": (
        {"config.yaml": f"hydra: {{callbacks: {CALLBACKS}}}"},
        ["--config-path", "PARTS", "--config-name", "config"],
    ),
    "recipe of a model": (
        {"recipe/a.yaml": f"{HEAD}models: {{policy: {{recipe: b}}}}", "recipe/b.yaml": f"{HEAD}hydra: {{verbose: 1}}"},
        ["recipe=a"],
    ),
    "recipe given by its path": (
        {"mine.yaml": f"{HEAD}hydra: {{callbacks: {CALLBACKS}}}"},
        ["recipe=PARTS/mine.yaml"],
    ),
    "recipe of a run to resume": (
        {"recipe.yaml": f"{HEAD}hydra: {{callbacks: {CALLBACKS}}}"},
        ["resume=PARTS"],
    ),
    "target": ({"recipe/a.yaml": f"{HEAD}models: {{policy: {{_target_: os.system, command: x}}}}"}, ["recipe=a"]),
    "target in a list": ({"recipe/a.yaml": f"{HEAD}data: {{options: {{x: [{{_target_: os.abort}}]}}}}"}, ["recipe=a"]),
}

TARGETS = [
    "distutils.spawn.spawn", "os.system", "os.popen", "os.execv", "os.remove", "os.makedirs", "os.putenv",
    "os.abort", "subprocess.run", "subprocess.Popen", "subprocess.check_output", "shutil.rmtree", "shutil.copyfile",
    "builtins.exec", "builtins.eval", "builtins.open", "builtins.__import__", "importlib.import_module",
    "runpy.run_path", "pickle.load", "numpy.load", "numpy.fromfile", "torch.load", "site.addsitedir",
    "code.interact", "pty.spawn", "webbrowser.open", "urllib.request.urlretrieve", "pathlib.Path.touch",
    "logging.FileHandler", "tempfile.mkdtemp", "ctypes.CDLL", "hydra.utils.instantiate", "socket.create_connection",
]  # fmt: skip


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "parts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder / "parts"


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


@pytest.mark.parametrize("target", TARGETS)
def test_no_file_names_a_function_for_hydra(target: str, tmp_path: Path) -> None:
    parts = written(tmp_path, {"recipe/a.yaml": f"{HEAD}graph: {{rewards: {{_target_: {target}}}}}"})
    with pytest.raises(FileError) as raised:
        compose(["recipe=a"], parts)
    assert str(raised.value) == (
        "parts/recipe/a.yaml: 'graph.rewards._target_' would make Hydra call a function.\n"
        "  Fix: remove it; name your own code as package.module:name (docs/extending.md)."
    )


def test_a_plan_does_not_configure_hydra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = rlflow.compile(rlflow.load(["recipe=grpo_tiny"]), "local").to_dict()
    callbacks = {"x": {"_target_": "tests.unit.hostile.Callback"}}
    hostile = plan | {"hydra": {"callbacks": callbacks}, "recipe": plan["recipe"] | {"hydra": {"callbacks": callbacks}}}
    (tmp_path / "plan.json").write_text(json.dumps(hostile))
    monkeypatch.setattr(sys, "argv", ["rlflow", "plan=plan.json", "dry_run=true"])
    assert main() == 2
    assert EFFECTS == []
    assert capsys.readouterr().err.startswith("RecipeError: hydra: unknown key")


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
    """Not by a name that is put together either; the command line is no exception, since plans are shared."""
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
