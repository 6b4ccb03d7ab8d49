"""Recipes from strangers that try to run a program, to read a secret, or to fill the memory, and what takes effect.

A configuration takes effect if a function of its choice is called, a file of its choice is written, the marked secret
of the environment or of another file is shown, an escape code reaches the terminal, or the command succeeds although
its file is hostile.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from benchmarks.hostile_files import FILES
from rlflow.cli import main
from rlflow.errors import FileError
from rlflow.recipe.yaml_files import read_yaml

EFFECTS: list[str] = []
SECRET = "marked-secret-5309"


class Callback:
    """A callback of Hydra that records that it was made; a recipe must never get that far."""

    def __init__(self, name: str = "callback", **_: Any) -> None:
        EFFECTS.append(name)

    def on_job_start(self, **_: Any) -> None:
        EFFECTS.append("job start")


HEAD = "# @package _global_\ndefaults: [grpo_tiny, _self_]\n"
CALLBACKS = "{x: {_target_: benchmarks.hostile_recipes.Callback}}"

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
        {"recipe/a.yaml": f"{HEAD}hydra: {{launcher: {{_target_: benchmarks.hostile_recipes.Callback}}}}"},
        ["-m", "recipe=a", "seed=1,2"],
    ),
    "package header": (
        {"recipe/a.yaml": f"# @package hydra\ncallbacks: {CALLBACKS}"},
        ["recipe=a"],
    ),
    "package header below": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, b]",
            "recipe/b.yaml": "# @package hydra.callbacks.x\n_target_: benchmarks.hostile_recipes.Callback",
        },
        ["recipe=a"],
    ),
    "package of a default": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, /extra@hydra.callbacks.x: b]",
            "extra/b.yaml": "_target_: benchmarks.hostile_recipes.Callback",
        },
        ["recipe=a"],
    ),
    "absolute package of a default": (
        {
            "recipe/a.yaml": "# @package _global_\ndefaults: [grpo_tiny, /extra/b@_global_.hydra.callbacks.x]",
            "extra/b.yaml": "_target_: benchmarks.hostile_recipes.Callback",
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

# Texts that follow the head of a recipe file.
TEXTS = {
    "environment": "name: ${oc.env:MARKED}",
    "environment in a text": "data: {system_prompt: 'x ${oc.env:MARKED} x'}",
    "environment by a name that is put together": "data: {name: oc, source: '${${.name}.env:MARKED}'}",
    "environment with a default": "name: ${oc.env:NOT_SET,x}",
    "environment in an option of the command line": "cluster: {shape: '${oc.env:MARKED}'}",
    "environment in tune": "tune: ${oc.env:MARKED}",
    "decoded": "steps: ${oc.decode:'50'}",
    "decoded environment": "steps: ${oc.decode:${oc.env:MARKED}}",
    "created": "data: {options: '${oc.create:{digits: 2}}'}",
    "selected with a default from the environment": "name: ${oc.select:nothing,${oc.env:MARKED}}",
    "keys": "data: {options: {x: '${oc.dict.keys:models}'}}",
    "deprecated": "name: ${oc.deprecated:seed}",
    "Hydra's values": "name: ${hydra:runtime.cwd}",
    "the clock": "name: ${now:%Y}",
    "the version of Python": "name: ${python_version:}",
    "a saved plan": "plan: PARTS/secret.json",
    "a run to continue": "resume: PARTS",
    "a calibration": "calibration: PARTS/secret.yaml",
    "a reward that is a program": "graph: {rewards: {function: 'os:system'}}",
    "a reward that is Python's": "graph: {rewards: {function: 'builtins:exec'}}",
    "a module that acts on import": "graph: {rewards: {function: 'antigravity:x'}}",
    "a node that is Python's": "graph: {rewards: {node: 'os:abort'}}",
    "a data set that is a program": "data: {source: 'subprocess:run', options: {args: ls}}",
    "a tag": "name: !!python/object/apply:os.system [ls]",
    "a new object": "name: !!python/object/new:os.system [ls]",
    "a module as a tag": "name: !!python/module:antigravity",
    "a name that leads out": "name: ../../escaped",
    "a node that leads out": "graph: {../escaped: {node: reward}}",
    "a model that leads out": "models: {/tmp/escaped: {path: x}}",
    "an escape code": 'name: "\\e]0;owned\\a"',
    "text that turns around": 'name: "\\u202e"',
    "references that double": "data: {options: {a0: xxxxxxxxxxxxxxxx"
    + "".join(f", a{n}: '${{.a{n - 1}}}${{.a{n - 1}}}'" for n in range(1, 60))
    + "}}",
}
DEFAULTS = {
    "environment": "/data: ${oc.env:MARKED}",
    "environment in quotes": "'/data: ${oc.env:MARKED}'",
    "environment in an override": "{override /data: '${oc.env:MARKED}'}",
    "folder above": "/data@data.options: ../../secret",
    "folder above the group": "/../secret@data.options",
    "absolute path": "{/recipe@data.options: PARTS/secret.yaml}",
    "home": "{/recipe@data.options: ~/secret}",
    "module": "{/data@data.options: 'pkg://tests/secret'}",
}

_MANY = "x, " * 20_000
BOMBS = {
    "alias": "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
    "merge": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
    "brackets": "[" * 60_000,
    "braces": "{" * 60_000,
    "indents": "".join(f"{' ' * n}a:\n" for n in range(300)),
    "dashes": "- " * 30_000,
    "question marks": "? " * 30_000,
    "values": f"a: [{_MANY}x]",
    "digits": f"a: {'9' * 60_000}",
    "a large file": "a: 1\n" * 1_000_000,
    "doubled keys": "a: 1\na: 1\n",
    "escapes": 'a: "' + r"\x41" * 15_000 + '" b',
    "lines": "a: |\n" + " x\n" * 20_000 + "b",
    "as many lines as a file may have": "a: |\n" + " x\n" * 9_999 + "b",
    "references": f"a: '{'${' * 30_000}'",
    "aliases in a circle": "a: &x [*x]",
}


def cases() -> dict[str, tuple[Mapping[str, str], Sequence[str]]]:
    """Return the files and the command line of each hostile configuration, without bombs."""
    found: dict[str, tuple[Mapping[str, str], Sequence[str]]] = {**WAYS, **FILES}
    for target in TARGETS:
        found[f"target {target}"] = (
            {"recipe/a.yaml": f"{HEAD}graph: {{rewards: {{_target_: {target}}}}}"},
            ["recipe=a"],
        )
    for name, text in TEXTS.items():
        found[f"text: {name}"] = ({"recipe/a.yaml": f"{HEAD}{text}"}, ["recipe=a"])
    for name, entry in DEFAULTS.items():
        head = f"# @package _global_\ndefaults:\n  - grpo_tiny\n  - {entry}\n  - _self_\n"
        found[f"defaults: {name}"] = ({"recipe/a.yaml": head}, ["recipe=a"])
    return found


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write the files into ``folder/parts`` and return that folder."""
    parts = folder / "parts"
    for name, text in files.items():
        path = parts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("PARTS", str(parts)) + "\n")
    return parts


def effect(files: Mapping[str, str], words: Sequence[str], folder: Path) -> str:
    """Run a hostile configuration in ``folder``; return how it took effect, or an empty text."""
    parts = write_files(folder, {**files, "secret.yaml": f"marked: {SECRET}", "secret.json": f'{{"a": "{SECRET}"}}'})
    before, arguments, environment = os.getcwd(), sys.argv, os.environ.get("MARKED")
    EFFECTS.clear()
    GlobalHydra.instance().clear()
    output = io.StringIO()
    os.chdir(folder)
    os.environ["MARKED"] = SECRET
    config_dir = [] if "--config-path" in words else ["--config-dir", str(parts)]
    sys.argv = ["rlflow", *config_dir, *(word.replace("PARTS", str(parts)) for word in words), "dry_run=true"]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main()
    finally:
        os.chdir(before)
        sys.argv = arguments
        os.environ.pop("MARKED")
        if environment is not None:
            os.environ["MARKED"] = environment
    written = [path.name for path in folder.iterdir() if path.name not in ("parts", "outputs", "multirun")]
    plans = "".join(path.read_text() for path in folder.rglob("plan.json"))
    if EFFECTS:
        return f"called {EFFECTS[0]}"
    if written:
        return f"wrote {written[0]}"
    if SECRET in output.getvalue() + plans:
        return "showed the secret"
    if "\x1b" in output.getvalue():
        return "sent an escape code to the terminal"
    return "" if code == 2 else f"exit code {code}"


def cost_of_bomb(text: str, folder: Path) -> tuple[str, float, float]:
    """Read a bomb; return its error, the seconds of CPU, and the MiB by which the peak of memory grew."""
    path = folder / "bomb.yaml"
    path.write_text(text)
    peak, start = getrusage(RUSAGE_SELF).ru_maxrss, time.thread_time()
    try:
        read_yaml(path)
        message = ""
    except FileError as error:
        message = str(error)
    return message, time.thread_time() - start, (getrusage(RUSAGE_SELF).ru_maxrss - peak) / 1024
