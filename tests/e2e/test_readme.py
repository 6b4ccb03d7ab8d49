"""The README is true: its commands run, what it shows is what they print, its tree is the real one."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, Typed

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
SHOWN = [block for language, block in BLOCKS if language == "console" and block.startswith("$ python -m rlflow")]
# What a dry run prints is the same everywhere; a run also tells times.
CONSOLE = [block for block in SHOWN if "dry_run=true" in block.splitlines()[0]]
RUNS = [block for block in SHOWN if block not in CONSOLE]
DRY_RUNS = sorted(set(re.findall(r"`(python -m rlflow [^`]*dry_run=true)`", README)))


def run(command: str, typed: Typed) -> tuple[int, str]:
    """Run what stands behind ``python -m rlflow``: its exit code, and its output with the errors behind it."""
    python, _, module, *arguments = shlex.split(command)
    assert (python, module) == ("python", "rlflow")
    code, out, errors = typed(*arguments)
    return code, out + errors


def lines(text: str) -> list[str]:
    """Without the spaces at their ends and the time in the run's folder."""
    return [re.sub(r"outputs/\S+/", "outputs/", line.rstrip()) for line in text.strip().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.splitlines()[0])
def test_what_is_shown_is_what_is_printed(block: str, typed: Typed) -> None:
    command, shown = block.removeprefix("$ ").split("\n", 1)
    assert lines(run(command, typed)[1]) == lines(shown)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNS, ids=lambda block: block.splitlines()[0])
def test_the_plan_of_a_run_is_what_is_printed(block: str, typed: Typed) -> None:
    command, shown = block.removeprefix("$ ").split("\n", 1)
    *plan, _, file = lines(run(f"{command} dry_run=true", typed)[1])
    assert "fingerprint" in plan[-1]
    assert file.startswith("plan: ")
    assert lines(shown)[: len(plan)] == plan


@pytest.mark.slow
@pytest.mark.parametrize("command", DRY_RUNS)
def test_commands_run(command: str, typed: Typed) -> None:
    assert run(command, typed)[0] == 0


def test_the_recipe_is_the_file() -> None:
    (shown,) = [block for language, block in BLOCKS if language == "yaml"]
    assert shown == (ROOT / "recipes" / "grpo_tiny.yaml").read_text()


def test_the_tree_is_the_real_one() -> None:
    (tree,) = [block for _, block in BLOCKS if "\nrlflow/" in block]
    shown = {line.split()[0] for line in tree.splitlines() if line.strip()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    ).stdout
    paths = [Path(line) for line in tracked.splitlines() if not line.startswith(".")]
    real = {f"{path.parts[0]}/" if len(path.parts) > 1 else path.name for path in paths}
    real |= {
        f"rlflow/{path.parts[1]}" + ("/" if len(path.parts) > 2 else "") for path in paths if path.parts[0] == "rlflow"
    }
    real -= {"rlflow/__init__.py", "rlflow/__main__.py"}
    assert shown == real


def test_the_commands_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in ("demo", "test", "check"):
        assert f"make {name}" in README
        assert f"\n{name}:" in makefile
