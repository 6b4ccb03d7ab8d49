"""Uploads to the hub, by huggingface_hub's own client to a stand-in of the hub on this machine."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from huggingface_hub import constants

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError
from rlflow.report.hub import check_push, push, pushed_role
from rlflow.runtime.protocols import Report
from tests.conftest import CONFIG_DIR, FAKE, ROOT, Typed
from tests.helpers import load
from tests.hub_server import READER, TOKEN, Hub, Repository, serving
from tests.unit.report.test_model_card import report_of

# huggingface_hub itself causes this warning when it uploads several files without Xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")

NAME = "ada/sums"
LATER = f"\n  Fix: leave it out, and upload the model later: hf upload {NAME} FOLDER . --private."
LOGIN = "\n  Fix: hf auth login, or HF_TOKEN with a token that may write."


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Serve a hub. Its client uploads large files by LFS, because Xet has a protocol of its own below HTTP."""
    with serving() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


@cache
def compiled(recipe: str) -> Plan:
    return rlflow.compile(load(f"recipe={recipe}", config_dir=CONFIG_DIR), "local")


def plan_of(name: str | None = NAME, recipe: str = "fake") -> Plan:
    plan = compiled(recipe)
    return replace(plan, recipe=replace(plan.recipe, push_to_hub=name))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a folder as the export of a model with adapters leaves it."""
    folder = tmp_path / "my runs" / "model"
    (folder / "adapters").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# sums\n")
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_bytes(bytes(range(256)) * 9)
    (folder / "model-00002-of-00002.safetensors").write_bytes(bytes(range(256)) * 7)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "adapters" / "adapter_model.safetensors").write_bytes(b"adapters")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def finished(plan: Plan, model: Path) -> Report:
    return report_of(plan, models={"actor": str(model)})


def test_a_new_repository_is_private_and_gets_the_folder(
    hub: Hub, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of()
    check_push(plan)
    assert hub.repositories[NAME] == Repository(private=True)
    assert push(plan, finished(plan, model)) == f"{hub.url}/{NAME}"
    repository = hub.repositories[NAME]
    assert repository.files == contents(model) | {".gitattributes": b""}
    assert repository.commits == ["fake after 100 steps"]
    assert len(hub.large) == 3
    assert capfd.readouterr().err == ""


def test_the_repository_may_exist_and_loses_weights_that_would_be_loaded_in_place_of_the_new_ones(
    hub: Hub, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = dict.fromkeys(("model.safetensors", "adapters/x.json", "config.json", "LICENSE"), b"old")
    hub.repositories[NAME] = Repository(private=False, files=before)
    plan = plan_of()
    check_push(plan)
    warning = f"warning: push_to_hub: the repository '{NAME}' is public, and so will be the model\n"
    assert capfd.readouterr().err == warning
    push(plan, finished(plan, model))
    assert hub.repositories[NAME].files == contents(model) | {"LICENSE": b"old"}
    assert not hub.repositories[NAME].private


@pytest.mark.parametrize("name", ["sums", "ada/sums/more", "ada/-sums", "../sums", "ada/", "/home/ada"])
def test_a_wrong_name_is_refused_before_anything_is_asked(name: str, hub: Hub) -> None:
    with pytest.raises(RecipeError) as raised:
        check_push(plan_of(name))
    fact = f"push_to_hub: expected the name of a repository, got '{name}'."
    assert str(raised.value) == f"{fact}\n  Fix: push_to_hub=USER/NAME."
    assert hub.asked == []


def test_a_missing_login_is_told_before_the_run(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RecipeError) as raised:
        check_push(plan_of())
    fact = "push_to_hub: an upload to the Hugging Face hub needs a login, and there is none."
    assert str(raised.value) == fact + LOGIN
    assert hub.asked == []


@pytest.mark.parametrize(
    ("token", "name"), [("hf_marked0000Unknown", NAME), (READER, NAME), (TOKEN, "grace/sums"), (READER, "ada/existing")]
)
def test_a_token_that_may_not_write_is_told_before_the_run(
    token: str, name: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last repository exists, so creating it again does not fail."""
    hub.repositories["ada/existing"] = Repository()
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(RecipeError) as raised:
        check_push(plan_of(name))
    assert str(raised.value).startswith(f"push_to_hub: your token may not write to '{name}' (")
    assert str(raised.value).endswith(LOGIN)
    assert "marked" not in str(raised.value)


def test_a_hub_that_cannot_be_reached_is_told_before_the_run(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.failing["/api/repos/create"] = 501
    with pytest.raises(RecipeError) as raised:
        check_push(plan_of())
    fact = f"push_to_hub: the Hugging Face hub cannot be asked for '{NAME}' (HfHubHTTPError"
    assert str(raised.value).startswith(fact)
    assert str(raised.value).endswith(LATER)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="offline mode is enabled"):
        check_push(plan_of())


def test_a_failed_upload_is_a_warning_with_the_command_that_repeats_it(
    hub: Hub, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of()
    check_push(plan)
    hub.failing["/commit/"] = 501
    assert push(plan, finished(plan, model)) is None
    warning = capfd.readouterr().err
    assert warning.startswith("warning: push_to_hub: the model was not uploaded (HfHubHTTPError: ")
    assert warning.endswith(f"; repeat with: hf upload {NAME} '{model}' . --private\n")
    assert "marked" not in warning


def test_a_token_that_is_no_text_of_http_is_in_no_warning(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The client's error quotes the header that it cannot send. The token is not in the environment, but in a file."""
    monkeypatch.delenv("HF_TOKEN")
    Path(constants.HF_TOKEN_PATH).write_text("hf_märked8125")
    with pytest.raises(RecipeError) as raised:
        check_push(plan_of())
    plan = plan_of()
    assert push(plan, finished(plan, model)) is None
    assert "rked8125" not in str(raised.value) + capfd.readouterr().err


def test_a_run_that_was_stopped_uploads_nothing(hub: Hub) -> None:
    plan = plan_of()
    assert push(plan, report_of(plan, status="stopped", models={})) is None
    assert hub.asked == []


def test_a_critic_is_not_uploaded_but_of_two_actors_none_is_chosen() -> None:
    assert pushed_role(plan_of(recipe="ppo_tiny")) == "actor"
    assert pushed_role(plan_of(None)) is None
    plan = plan_of()
    (update,) = [node for node in plan.graph.nodes if "Trains" in node.capabilities]
    nodes = (*plan.graph.nodes, replace(update, name="second_update", role="second"))
    with pytest.raises(RecipeError, match="uploads the model of one role, and this recipe trains actor, second"):
        pushed_role(replace(plan, graph=replace(plan.graph, nodes=nodes)))


def test_it_is_no_part_of_the_experiment() -> None:
    assert plan_of().fingerprint == plan_of(None).fingerprint


@pytest.mark.slow
def test_a_dry_run_asks_nothing(hub: Hub, typed: Typed) -> None:
    code, _, errors = typed(*FAKE, f"push_to_hub={NAME}", "dry_run=true")
    assert (code, errors, hub.asked) == (0, "", [])


@pytest.mark.slow
def test_a_sweep_is_refused_before_it_asks_anything(hub: Hub, typed: Typed) -> None:
    code, _, errors = typed("-m", *FAKE, "steps=2", "seed=1,2", f"push_to_hub={NAME}")
    fact = "RecipeError: push_to_hub: each job of a sweep would replace the model of the one before."
    fix = "Fix: leave it out, and upload the model later: hf upload USER/NAME FOLDER . --private."
    assert (code, errors, hub.asked) == (2, f"{fact}\n  {fix}\n" * 2, [])


@pytest.mark.slow
def test_a_run_uploads_its_model_and_writes_no_token(hub: Hub, typed: Typed, tmp_path: Path) -> None:
    code, out, errors = typed(*FAKE, "steps=2", f"push_to_hub={NAME}")
    assert code == 0, errors
    assert out.splitlines()[-1] == f"  uploaded to: {hub.url}/{NAME}"
    (folder,) = tmp_path.glob("outputs/*/*")
    uploaded = hub.repositories[NAME].files
    assert uploaded == contents(folder / "model" / "actor") | {".gitattributes": b""}
    assert b'\nname = "ada/sums"\n' in uploaded["README.md"]
    assert "marked" not in out + errors
    assert [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_a_run_whose_upload_fails_has_succeeded_and_the_command_of_the_page_repeats_it(
    hub: Hub, typed: Typed, tmp_path: Path
) -> None:
    """The command runs as a user would type it, in a process of its own."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    run, upload = re.findall(r"^(rlflow push_to_hub=\S+|hf upload .*?) +#", page, flags=re.MULTILINE)
    hub.failing["/preupload/"] = 400
    code, _, errors = typed(*FAKE, "steps=2", run.split()[-1].replace("USER/NAME", NAME))
    assert code == 0
    hub.failing.clear()
    (folder,) = tmp_path.glob("outputs/*/*/model/actor")
    date, time = folder.parts[-4:-2]
    command = upload.replace("USER/NAME", NAME).replace("DATE/TIME", f"{date}/{time}").replace("ROLE", "actor")
    assert re.findall("repeat with: (.*)", errors) == [command]
    done = subprocess.run(
        [Path(sys.executable).with_name("hf"), *shlex.split(command)[1:]],
        cwd=tmp_path,
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert hub.repositories[NAME].files == contents(folder) | {".gitattributes": b""}
