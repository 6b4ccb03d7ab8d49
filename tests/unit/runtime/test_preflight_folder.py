"""The folder of a run: links in it are refused, and other people's files in it stay."""

from pathlib import Path

import pytest

from rlflow.errors import RecipeError
from rlflow.runtime.checkpoint import remove_unfinished
from rlflow.runtime.preflight import check_directory


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints",
        "model",
        "skipped",
        "journal",
        ".lock",
        "metrics.jsonl",
        "plan.json.writing",
        "base/policy",
        "checkpoints/step-000001",
        "journal/step-000001/a",
        "model/actor/config.json",
    ],
)
def test_a_link_is_refused(name: str, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    link = run / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    for resume in (True, False):
        with pytest.raises(RecipeError, match=r"hydra.run.dir: '.*' is a link to '.*outside'") as raised:
            check_directory(run, resume=resume)
        assert str(link) in str(raised.value)


def test_a_link_to_the_run_and_links_of_trackers_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "run" / "wandb").mkdir(parents=True)
    (tmp_path / "run" / "wandb" / "latest-run").symlink_to("run-1")
    (tmp_path / "last").symlink_to("run")
    check_directory(tmp_path / "last", resume=True)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/.precious-stuff",
        "model/.my-keys",
        "model/.my-notebook/text",
        "skipped/.step-1-removed",
        "checkpoints/.step-000001-abcdefgh/notes",
    ],
)
def test_folders_of_other_people_stay(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    remove_unfinished(tmp_path)
    assert (tmp_path / name).exists()


def test_a_link_with_the_name_of_an_unfinished_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "outside" / "actor").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".actor-abcdefgh").symlink_to(tmp_path / "outside")
    remove_unfinished(tmp_path)
    assert (tmp_path / "outside" / "actor").is_dir()
