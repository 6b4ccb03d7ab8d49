"""Training goes on: for more steps, and with what may change between two steps."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import EngineError
from rlflow.runtime.local import LocalRuntime
from tests.conftest import FAKE, Typed

SHORT = ("hydra.run.dir=run", "evaluation.every=4", "checkpoints.every=4")


def steps(folder: Path) -> list[int]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "tokens" in line]


def manifest(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").read_text())
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the first ``run`` is kept for the tests that follow."""
    return tmp_path_factory.mktemp("finished") / "run"


@pytest.fixture
def run(typed: Typed, tmp_path: Path, finished: Path) -> Path:
    """Return the folder of a run of 4 steps of 3 prompts that has ended."""
    folder = tmp_path / "run"
    if not finished.exists():
        code, _, errors = typed(*FAKE, *SHORT, "steps=4")
        assert code == 0, errors
        shutil.copytree(folder, finished)
    else:
        shutil.copytree(finished, folder)
    return folder


@pytest.mark.slow
def test_more_steps(typed: Typed, run: Path) -> None:
    model = (run / "model" / "actor").stat().st_ino
    code, out, errors = typed("resume=run", "steps=+3")
    assert code == 0, errors
    assert "fake: 7 steps, from step 4, in run" in out
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7]
    assert json.loads((run / "report.json").read_text())["steps"] == 7
    assert (run / "model" / "actor").stat().st_ino != model, "the model is that of all steps"
    assert typed("resume=run", "steps=8")[0] == 0, "a number is that of all steps, too"
    assert steps(run)[-1] == 8


@pytest.mark.slow
def test_another_batch_size_takes_the_rows_that_come_next(typed: Typed, run: Path) -> None:
    code, _, errors = typed("resume=run", "steps=+2", "data.batch_size=5", "lr=1.0e-4")
    assert code == 0, errors
    assert manifest(run, 6)["rows"] == 4 * 3 + 2 * 5
    code, _, errors = typed("resume=run", "steps=+1")
    assert code == 0, errors
    assert manifest(run, 7)["rows"] == 4 * 3 + 3 * 5, "what was changed stays so"
    assert manifest(run, 7)["experiment"]["roles"]["actor"]["optimizer"]["learning_rate"] == 1.0e-4


@pytest.mark.slow
def test_the_last_run_of_a_recipe_for_more_steps(typed: Typed, tmp_path: Path) -> None:
    given = (*FAKE, "evaluation=null")
    assert typed(*given, "hydra.run.dir=outputs/a/b", "steps=2")[0] == 0
    assert typed(*given, "hydra.run.dir=outputs/a/c", "steps=2", "lr=1.0e-4")[0] == 0
    code, out, errors = typed(*given, "hydra.run.dir=outputs/a/d", "resume=true", "steps=+1")
    assert code == 0, errors
    assert "from step 2, in outputs/a/b" in out, "the newer run is another experiment"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("resume=run", "n=4"),
            "RecipeError: resume: 'run' was trained with graph.rollouts.group_size 2, this recipe has 4",
        ),
        (("resume=run", "steps=3"), "RecipeError: steps: 3 is less than the 4 steps that the run has made"),
        ((*FAKE, "steps=+3"), "RecipeError: steps: '+3' adds to the steps of an earlier run"),
        ((*FAKE, "steps=+x"), "RecipeError: steps: '+x' is not valid"),
        (("recipe=grpo_tiny", "resume=run"), "RecipeError: resume: 'run' was trained with "),
    ],
    ids=lambda each: " ".join(each[-2:]) if isinstance(each, tuple) else "",
)
def test_what_cannot_go_on(arguments: tuple[str, ...], message: str, typed: Typed, run: Path) -> None:
    code, _, errors = typed(*arguments)
    assert code == 2
    assert errors.startswith(message)
    assert steps(run) == [1, 2, 3, 4]
    assert json.loads((run / "report.json").read_text())["steps"] == 4


@pytest.mark.slow
def test_it_goes_on_where_it_was_unless_told(typed: Typed, tmp_path: Path) -> None:
    assert typed(*FAKE, "hydra.run.dir=run", "steps=1", "cluster=1x2@cpu", "roles.actor.gpus=1", "dry_run=true")[0] == 0
    assert "fake on 1x2@cpu" in typed("resume=run", "steps=+1", "dry_run=true")[1]
    assert "fake on 1x1@cpu" in typed("resume=run", "steps=+1", "dry_run=true", "cluster=local")[1]


@pytest.mark.slow
def test_a_run_that_fails_says_how_to_continue(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is a checkpoint."""

    def fail(*arguments: Any, **named: Any) -> None:
        raise EngineError("role actor: worker 0 died.")

    with monkeypatch.context() as patch:
        patch.setattr(LocalRuntime, "start", fail)
        code, _, errors = typed(*FAKE, "steps=2", "hydra.run.dir=run")
    assert (code, "continue with" in errors) == (1, False)
    assert typed(*FAKE, "steps=2", "hydra.run.dir=run")[0] == 0
    monkeypatch.setattr(LocalRuntime, "start", fail)
    code, _, errors = typed(*FAKE, "steps=4", "resume=run")
    assert code == 1
    assert "role actor: worker 0 died." in errors
    assert "continue with: rlflow plan=run/plan.json resume=run" in errors
