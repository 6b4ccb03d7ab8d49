"""The command line as a user types it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import CONFIG_DIR, ROOT, Typed

pytestmark = pytest.mark.slow


class Done(NamedTuple):
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def rlflow(typed: Typed) -> Command:
    """Return a function that runs the command in this process, and checks its exit code."""

    def run(*arguments: str, code: int = 0) -> Done:
        ended, out, errors = typed(*arguments)
        assert ended == code, out + errors
        assert "Traceback" not in errors
        return Done(out, errors)

    return run


def as_a_process(*arguments: str, cwd: Path, code: int = 0) -> Done:
    """Run the command in a process of its own, and check its exit code and that it shows no traceback."""
    command = [sys.executable, "-m", "rlflow", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return Done(done.stdout, done.stderr)


def fake(*arguments: str) -> tuple[str, ...]:
    return ("--config-dir", str(CONFIG_DIR), "recipe=fake", *arguments)


def run_folders(cwd: Path) -> list[Path]:
    return sorted(path.parent for path in cwd.glob("outputs/*/*/plan.json"))


def test_a_run(tmp_path: Path, rlflow: Command) -> None:
    out = rlflow(*fake()).stdout
    (folder,) = run_folders(tmp_path)
    assert "fake on 1x1@cpu" in out
    assert "held-out reward: eval_before 0.000, eval_after 0." in out
    for name in ("recipe.yaml", "plan.json", "metrics.jsonl", "report.json", "model", "checkpoints"):
        assert (folder / name).exists(), name


def test_a_dry_run_imports_no_model_library(tmp_path: Path) -> None:
    code = (
        "import sys; from rlflow.cli import main; code = main();"
        "heavy = {'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "recipe=grpo_32b", "cluster=2x8", "dry_run=true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "grpo_32b on 2x8@h100_80gb   FITS" in done.stdout


def test_a_plan_can_be_given_back(tmp_path: Path, rlflow: Command) -> None:
    rlflow(*fake("dry_run=true"))
    (folder,) = run_folders(tmp_path)
    assert '"name": "fake"' in (folder / "plan.html").read_text()
    rlflow(f"plan={folder}/plan.json", "hydra.run.dir=again")
    assert json.loads((tmp_path / "again" / "report.json").read_text())["name"] == "fake"


def test_a_sweep(rlflow: Command) -> None:
    out = rlflow("-m", "recipe=grpo_32b", "cluster=1x8,2x8,4x8@h200", "dry_run=true").stdout
    assert [f"grpo_32b on {shape}" in out for shape in ("1x8@h100_80gb", "2x8@h100_80gb", "4x8@h200")] == [True] * 3
    ranked = [line.split()[:2] for line in out.splitlines() if line.startswith("cluster=")]
    assert ranked == [["cluster=4x8@h200", "yes"], ["cluster=2x8", "yes"], ["cluster=1x8", "yes"]]
    page = Path(out.splitlines()[-1].removeprefix("page: "))
    assert page.name == "plans.html"
    assert [f'"page": "{number}/plan.html"' in page.read_text() for number in range(3)] == [True] * 3
    assert all((page.parent / str(number) / "plan.html").exists() for number in range(3))


def test_a_sweep_tells_of_the_cluster_that_is_too_small(rlflow: Command) -> None:
    sweep = ("-m", "recipe=grpo_32b", "cluster=1x4,2x8", "roles.rollout.tensor_parallel_size=8", "dry_run=true")
    done = rlflow(*sweep, code=2)
    assert "PlacementError: roles.rollout: 8 GPUs of one tensor-parallel group do not fit" in done.stderr
    assert "grpo_32b on 2x8@h100_80gb" in done.stdout
    ranked = [line for line in done.stdout.splitlines() if line.startswith("cluster=")]
    assert [line.split()[1] for line in ranked[:2]] == ["yes", "no"]
    assert ranked[2].startswith("cluster=1x4: roles.rollout: 8 GPUs of one tensor-parallel group do not fit")


def test_a_run_in_use_then_ctrl_c_and_resume(tmp_path: Path, rlflow: Command) -> None:
    """A second run in its folder is refused, dry runs too, and the first stays as it is until it is interrupted."""
    arguments = [*fake("steps=100000", "checkpoints.every=100000", "evaluation=null")]
    command = [sys.executable, "-m", "rlflow", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("fake: "):
                break
        (folder,) = run_folders(tmp_path)
        plan, hydra = (folder / "plan.json").read_bytes(), sorted((folder / ".hydra").rglob("*"))
        for others in (("seed=1",), ("seed=1", "dry_run=true")):
            done = rlflow(*fake(*others, f"hydra.run.dir={folder.relative_to(tmp_path)}"), code=2)
            assert f"' is in use by another run, process {process.pid} on " in done.stderr
        assert (folder / "plan.json").read_bytes() == plan
        assert sorted((folder / ".hydra").rglob("*")) == hydra
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 130, rest
    assert "stopping after this step" in rest
    assert "continue with: rlflow plan=" in rest
    behind = json.loads((folder / "report.json").read_text())["steps"]
    assert behind < 100000
    out = rlflow(*arguments, "resume=true", "steps=+1").stdout
    assert (f"from step {behind}" in out) == (behind > 0)
    assert run_folders(tmp_path) == [folder], "it goes on in the same folder"


# One for each place where a mistake is found; tests of these places have the others.
MISTAKES = [
    (("steps",), "RecipeError: command line: "),
    (("nope=1",), "RecipeError: nope: unknown key"),
    (("graph.rewards.node=rewad",), "GraphError: graph.rewards.node: no kind of node 'rewad'"),
    (("cluster=2x8@h300",), "RecipeError: cluster: no gpu 'h300'"),
    (("cluster=2x8", "roles.actor.label=fast"), "PlacementError: roles.actor.label: no host has the label 'fast'"),
    (("calibration=nowhere",), "RecipeError: calibration: 'nowhere' cannot be read"),
    (("plan=nowhere.json",), "RecipeError: plan: a saved plan cannot be changed, got 'recipe'"),
    (("resume=true",), "RecipeError: resume: no run of this recipe with a checkpoint"),
    (("resume=nowhere", "dry_run=true"), "RecipeError: resume: 'nowhere' is not the folder of a run"),
    (("resume=",), "RecipeError: resume: '' is not the folder of a run"),
    (("data.split=no",), "RecipeError: data.source: 'rlflow.data.arithmetic:additions' failed (ValueError: expected"),
    (("models.policy.random_weights=false", "models.policy.characters=null", "models.policy.path=./no"),
     "RecipeError: models.policy.path: './no' is not a folder"),
    (("graph.rewards.function=rewards:few",), "RecipeError: graph.rewards.function: 'rewards:few' returned 0 values"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=[" ".join(overrides) for overrides, _ in MISTAKES])
def test_a_mistake_ends_in_one_message_and_leaves_nothing(
    overrides: tuple[str, ...], message: str, tmp_path: Path, rlflow: Command
) -> None:
    (tmp_path / "rewards.py").write_text("def few(texts, rows): return []\n")
    done = rlflow(*fake(*overrides), code=2)
    assert message in done.stderr
    left = {path.name for path in tmp_path.glob("outputs/**/*") if path.is_file()}
    assert not left or ("rewards:" in overrides[0] and "report.json" not in left)


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = as_a_process(*fake("recipe=grpo_tin"), cwd=tmp_path, code=2)
    assert done.stderr.startswith("RecipeError: recipe: no recipe 'grpo_tin'")
    assert done.stdout == ""


def test_a_mistake_takes_nothing_of_the_users(tmp_path: Path, rlflow: Command) -> None:
    (tmp_path / "mine.txt").write_text("dear")
    rlflow(*fake("hydra.run.dir=.", "steps=0"), code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "in_the_way", "fix"),
    [
        ((), "outputs", "remove or rename the file that has the name of a folder"),
        (("seed=1,2", "-m"), "sweep/jobs", "remove or rename what has that name"),
        # All plans are made by then, and only their summary cannot be written.
        (("seed=1,2", "-m"), "sweep/plans.html/", "remove or rename what has that name"),
    ],
)
def test_results_that_cannot_be_written(
    arguments: tuple[str, ...], in_the_way: str, fix: str, tmp_path: Path, rlflow: Command
) -> None:
    path = tmp_path / in_the_way
    path.parent.mkdir(exist_ok=True)
    if in_the_way.endswith("/"):
        path.mkdir()
    else:
        path.touch()
    errors = rlflow(*fake("dry_run=true", "hydra.sweep.dir=sweep", *arguments), code=1).stderr
    assert f"StorageError: {in_the_way.rstrip('/')}" in errors
    assert errors.endswith(f"\n  Fix: {fix}.\n")


def test_resume_passes_over_what_is_no_plan(tmp_path: Path, rlflow: Command) -> None:
    rlflow(*fake("hydra.run.dir=runs/a/b", "steps=2"))
    (tmp_path / "runs" / "a" / "c").mkdir()
    (tmp_path / "runs" / "a" / "c" / "plan.json").write_text("{")
    out = rlflow(*fake("hydra.run.dir=runs/a/d", "steps=2", "resume=true")).stdout
    assert "from step 2" in out
    rlflow(*fake("hydra.run.dir=one", "steps=2", "resume=true"), code=2)


def test_a_damaged_checkpoint(tmp_path: Path, rlflow: Command) -> None:
    """The run goes on from the one before, and says so; without one it does not go on."""
    rlflow(*fake("hydra.run.dir=run"))
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-000006" / "actor" / "state.json").write_text("{}")
    done = rlflow(*fake("resume=run"))
    assert "warning: the checkpoint run/checkpoints/step-000006 is damaged (actor/state.json has changed" in done.stdout
    assert "fake: 6 steps, from step 4, in run" in done.stdout
    for step in folder.glob("step-*"):
        (step / "actor" / "state.json").write_text("{}")
    done = rlflow(*fake("resume=run"), code=2)
    assert "RecipeError: resume: every checkpoint of 'run' is damaged" in done.stderr


def test_auto_takes_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlflow: Command) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-a)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-b)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    out = rlflow("recipe=grpo_7b", "cluster=auto", "dry_run=true").stdout
    assert "grpo_7b on 1x2@h200   FITS" in out
    assert "2 of 2 GPUs" in out


def test_a_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "rlflow", "recipe=grpo_32b", "cluster=2x8", "dry_run=true"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "16 of 16 GPUs" in done.stdout
    where = [sys.executable, "-c", "import rlflow; print(rlflow.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith(str(tmp_path))
    shipped = {path.stem for path in (tmp_path / "site" / "rlflow" / "conf" / "recipe").glob("*.yaml")}
    assert shipped == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
