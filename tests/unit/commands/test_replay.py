"""Replays of runs with damaged files: each is named, and nothing that a file holds changes the terminal."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlflow
from rlflow.batch import Prompts, images_of, pack_images
from rlflow.cli import run_subcommand
from rlflow.commands.replay import replay
from rlflow.compiler.plan import Plan, write_plan
from rlflow.data.digits import digits
from rlflow.data.images import images_by_digest, read_images
from rlflow.errors import RecipeError
from rlflow.runtime.skipped_steps import BatchWriter, read_skipped
from tests.conftest import CONFIG_DIR
from tests.helpers import load, prompts

FIX = "another step (--step N), or the folder of another run"
REASON = json.dumps({"node": "update", "reason": "the loss is nan"})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return rlflow.compile(load("recipe=real", config_dir=CONFIG_DIR))


def write_skipped(run: Path, plan: Plan, reason: str | None = REASON) -> Path:
    """Write the plan of a run and the reason of a skipped step; return the step's folder."""
    write_plan(plan, run)
    folder = run / "skipped" / "step-000001"
    folder.mkdir(parents=True)
    if reason is not None:
        (folder / "reason.json").write_text(reason)
    return folder


@pytest.mark.parametrize(
    ("reason", "fact"),
    [
        (None, "cannot be read (No such file or directory)"),
        *((text, "expected the texts 'node' and 'reason', found other content") for text in ("[]", "{", "{}", "")),
        ("[" * 100_000, "expected the texts 'node' and 'reason', found other content"),
        ('{"node": "update", "reason": 1}', "expected the texts 'node' and 'reason', found other content"),
    ],
    ids=["missing", "list", "torn", "empty object", "empty", "deep", "number"],
)
def test_a_damaged_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: Plan, reason: str | None, fact: str
) -> None:
    file = write_skipped(tmp_path, plan, reason) / "reason.json"
    assert run_subcommand("replay", [str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"FileError: {file}: {fact}.\n  Fix: {FIX}.\n"


# numpy leaves a file open that starts like an archive and is none.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("content", ["junk", "torn", "empty", "pickled", "array"])
def test_damaged_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: Plan, content: str) -> None:
    file = write_skipped(tmp_path, plan) / "rollouts.npz"
    arrays: Any = {"tokens": np.array([{}], object) if content == "pickled" else np.zeros(3)}
    np.savez(file, allow_pickle=True, **arrays)
    if content == "array":
        with file.open("wb") as opened:
            np.save(opened, np.zeros(3))
    elif content != "pickled":
        file.write_bytes({"junk": b"PK\x03\x04 junk", "torn": file.read_bytes()[:50], "empty": b""}[content])
    assert run_subcommand("replay", [str(tmp_path)]) == 2
    fact = "expected arrays as a run saves them, found other content"
    assert capsys.readouterr().err == f"FileError: {file}: {fact}.\n  Fix: {FIX}.\n"


def test_arrays_of_other_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
    folder = write_skipped(tmp_path, plan)
    np.savez(folder / "rollouts.npz", different=np.zeros(3))
    assert run_subcommand("replay", [str(tmp_path)]) == 2
    fact = "expected batches of this run's plan, found other fields (KeyError: 'other')"
    assert capsys.readouterr().err == f"FileError: {folder}: {fact}.\n  Fix: {FIX}.\n"


def test_images_are_saved_by_digest_and_read_in_the_data_again(tmp_path: Path, plan: Plan) -> None:
    folder = write_skipped(tmp_path, plan)
    sources = list(images_by_digest(read_images(plan.recipe.data, digits("test"))).values())[:3]
    images = pack_images([[sources[0].read()], [], [sources[2].read(), sources[1].read()]])
    batch = replace(prompts(), images=images).repeat(2)
    BatchWriter().write(str(folder / "prompts.npz"), batch, ["keys", "ids", "images"])
    content = (folder / "prompts.npz").read_bytes()
    assert sources[1].digest.encode() in content
    assert sources[1].read().encoded[-40:] not in content
    known = {source.digest: source for source in sources}
    again = read_skipped(folder, plan.graph, lambda: known).edges["prompts"]
    assert isinstance(again, Prompts)
    assert again.images is not None
    assert [images_of(again.images, row) for row in range(6)] == [images_of(images, row // 2) for row in range(6)]
    with pytest.raises(RecipeError, match="the data has 3 images of the step no more"):
        read_skipped(folder, plan.graph)


def test_an_invalid_plan_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
    write_skipped(tmp_path, plan)
    file = tmp_path / "plan.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "recipe": None}))
    assert run_subcommand("replay", [str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"RecipeError: {file}: recipe: None is not valid: ")
    file.write_text(json.dumps({**content, "schema_version": 0}))
    assert run_subcommand("replay", [str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"RecipeError: {file}: plan: schema_version is 0, ")
    file.write_text("[" * 100_000)
    assert run_subcommand("replay", [str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"RecipeError: plan: '{file}' cannot be read (")
    for depth in range(900, 1000, 5):
        nested = '{"a":' * depth + "1" + "}" * depth
        file.write_text(json.dumps({**content, "recipe": "DEEP"}).replace('"DEEP"', nested))
        assert run_subcommand("replay", [str(tmp_path)]) == 2
        assert str(file) in capsys.readouterr().err


def test_escapes_of_a_terminal_are_printed_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    reason = "\x1b[31mred\x1b]0;title\x07 \u202e and \u4e2d"
    write_skipped(tmp_path, plan, json.dumps({"node": "update", "reason": reason}))
    monkeypatch.setattr("rlflow.commands.replay._run_again", lambda *_: iter(()))
    assert next(replay(plan, tmp_path, None)).endswith(reason)
    assert run_subcommand("replay", [str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == r"step 1 was skipped: \x1b[31mred\x1b]0;title\x07 \u202e and " + "\u4e2d"
