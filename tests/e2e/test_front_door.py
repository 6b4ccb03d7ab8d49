"""The command line: what it prints, on a terminal too, and what it refuses."""

import fcntl
import os
import pty
import re
import runpy
import struct
import subprocess
import sys
import termios
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import rlflow
from rlflow.cli import SUBCOMMANDS, main
from tests.conftest import FAKE, ROOT, Typed


def test_the_command_is_installed_with_the_package() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["rlflow"].partition(":")
    assert getattr(import_module(module), function) is main


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_a_subcommand_is_also_found_as_a_module(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["python", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"rlflow.{command}", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: rlflow {command} [-h]")


def test_version_and_help(typed: Typed) -> None:
    assert typed("--version") == (0, f"rlflow {rlflow.__version__}\n", "")
    code, out, _ = typed("--help")
    assert (code, out.splitlines()[0].split()[0]) == (0, "rlflow")
    assert "Hydra's own options" in out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "doctro",
            "RecipeError: command line: 'doctro' is neither a command nor KEY=VALUE.",
        ),
        ("cluster=16", "RecipeError: cluster: '16' is neither"),
        ("cluster=null", "RecipeError: cluster: no cluster 'null'"),
        ("cluster=[1]", "RecipeError: cluster: [1] is not a name"),
        ("recipe=1.5", "RecipeError: recipe: no recipe '1.5'"),
        ("--shell-completion", "RecipeError: --shell-completion: is incomplete"),
        ("cluster.shape=1x1", "RecipeError: cluster.gpus: is missing"),
        (
            "cluster.hosts=[]",
            "RecipeError: cluster.hosts: cluster=auto cannot be combined with other keys of the cluster",
        ),
    ],
)
def test_no_traceback_for_a_slip(argument: str, message: str, typed: Typed) -> None:
    code, _, errors = typed(argument, "dry_run=true")
    assert code == 2
    assert errors.startswith(message)


@pytest.mark.slow
def test_the_users_own_modules_are_found(typed: Typed, tmp_path: Path) -> None:
    # A console command has its own folder in sys.path, and not the working directory.
    sys.path[:] = [path for path in sys.path if path not in ("", str(tmp_path))]
    (tmp_path / "rewards_of_mine.py").write_text("def score(texts, rows): return [0.0] * len(texts)\n")
    code, _, errors = typed(*FAKE, "graph.rewards.function=rewards_of_mine:score", "steps=1")
    assert code == 0, errors


@pytest.mark.slow
def test_a_recipe_for_gpus_is_not_started_on_a_cpu(typed: Typed) -> None:
    code, out, errors = typed("recipe=grpo_7b")
    assert code == 2
    assert re.search(r"warning       a step takes \d\.\d days on CPUs: this recipe is for GPUs", out)
    assert errors.startswith(
        "PlacementError: cluster: grpo_7b needs GPUs, and this machine has none; a step on its CPU"
    )
    assert errors.endswith(
        "  Fix: cluster=2x8 dry_run=true to plan for two hosts with eight GPUs, or cluster=local to run on this CPU.\n"
    )
    code, out, errors = typed("recipe=grpo_7b", "dry_run=true")
    assert (code, errors) == (0, "")
    code, _, errors = typed("recipe=grpo_7b", "cluster=local", "data.source=nowhere.jsonl")
    assert "is for GPUs" not in errors, "the CPU was asked for"


@pytest.mark.slow
def test_a_run_that_fails_is_no_sweep(typed: Typed) -> None:
    code, out, errors = typed(*FAKE, "data.source=nowhere.jsonl")
    assert code == 2
    assert "RecipeError: data.source: 'nowhere.jsonl' does not exist" in errors
    assert "GPU-hours" not in out


@pytest.mark.slow
def test_each_job_of_a_sweep_is_listed_once(typed: Typed) -> None:
    code, out, _ = typed("-m", *FAKE, "data.source=nowhere.jsonl", "seed=1,2")
    assert code == 2
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("seed")] == [
        ["seed=1", "0", "failed"],
        ["seed=2", "1", "failed"],
        ["seed=1:", "data.source:", "'nowhere.jsonl'"],
        ["seed=2:", "data.source:", "'nowhere.jsonl'"],
    ]
    assert typed("-m", *FAKE, "dry_run=true")[1].count("GPU-hours") == 0, "one job is ranked against none"


@pytest.mark.slow
def test_a_recipe_of_ones_own_in_a_sweep(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [grpo_tiny, _self_]\nname: mine\n")
    code, out, errors = typed("-m", "recipe=mine.yaml,grpo_tiny", "dry_run=true")
    assert code == 0, errors
    assert {line.split()[0] for line in out.splitlines() if line.startswith("recipe=")} == {
        "recipe=mine.yaml",
        "recipe=grpo_tiny",
    }


# The narrowest terminal. Unit tests of what is drawn have others.
WIDTH = 80


def on_terminal(*arguments: str, cwd: Path) -> list[str]:
    """Run rlflow on a terminal, and return all lines that it wrote, without colours."""
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    command = [sys.executable, "-m", "rlflow", *arguments]
    with subprocess.Popen(
        command,
        cwd=cwd,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env={**environment, "TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""},
    ) as process:
        os.close(inside)
        written = b""
        while True:
            try:
                part = os.read(outside, 65536)
            except OSError:  # as Linux ends a terminal that nobody holds
                break
            if not part:
                break
            written += part
        process.wait(timeout=60)
    os.close(outside)
    assert "\x1b[" in written.decode(), "colours"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text)]


@pytest.mark.slow
def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    lines = on_terminal(*FAKE, "steps=20", "evaluation.every=10", cwd=tmp_path)
    assert max(map(len, lines)) <= WIDTH
    assert any(re.fullmatch(r"step .*20/20 0:00:00", line) for line in lines), "the bar"
    metrics = r"length \d\.\d  reward 0\.\d{3}  kl 0\.0000  tokens/s \d+"
    assert any(re.fullmatch(metrics, line) for line in lines), "the metrics, whole and in one line"
    assert any(re.fullmatch(r"step    10  held-out reward 0\.\d{3}", line) for line in lines)


@pytest.mark.slow
def test_a_plan_and_an_error_on_a_terminal(tmp_path: Path) -> None:
    shapes = "cluster=2x8,1x2@h100_80gb"
    large = "roles.rollout.tensor_parallel_size=4"
    lines = on_terminal("-m", "recipe=grpo_32b", shapes, large, "explain=true", "dry_run=true", cwd=tmp_path)
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    words = r"rollout: the KV cache has room for \d+% of the batch at once; other sequences wait"
    assert re.search(words, " ".join(text.split()))
    assert not [line for line in lines if line.endswith("…")], "nothing is cut"
    (ranked,) = [line.split() for line in lines if line.startswith("cluster=2x8 ")]
    assert ranked[:2] == ["cluster=2x8", "yes"]
    error = next(index for index, line in enumerate(lines) if line.startswith("PlacementError: "))
    below = lines[error + 1 : error + 3]
    assert all(line.startswith("  ") for line in below), "its lines stand under it"
    node = next(line for line in lines if line.startswith("advantages "))
    assert "RolloutAdvantages" in node, "no word is divided"


@pytest.mark.slow
def test_a_reader_that_leaves_early_sees_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m rlflow cluster=2x8 dry_run=true | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("grpo_tiny on 2x8@h100_80gb ")
    assert done.stderr == ""
