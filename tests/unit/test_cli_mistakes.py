"""Values that no type can hold, files that are no text, and disks that take no more: one message each."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import SafetensorError

import rlflow
from rlflow.cli import main
from rlflow.compiler.plan import read_plan
from rlflow.errors import EngineError, RecipeError, StorageError, storage_error
from rlflow.system.atomic_folder import write_folder
from rlflow.system.text_files import append_lines
from tests.conftest import CONFIG_DIR

ENDS_WITHOUT_SPACE = Path("/dev/full")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("roles.actor.optimizer={betas: [0.9]}", "roles.actor.optimizer.betas: [0.9] is not valid: expected more than"),
        ("roles.actor.optimizer={betas: []}", "roles.actor.optimizer.betas: [] is not valid: expected more than 0"),
        ("data.batch_size=1e20", "data.batch_size: 1e+20 is not valid"),
        ("data.batch_size=100000000000000000000", "data.batch_size: 100000000000000000000 is not valid"),
        ("steps=100000000000000000000", "steps: 100000000000000000000 is not valid"),
        ("seed=100000000000000000000", "seed: 100000000000000000000 is not valid"),
        ("cluster=null", "cluster: no cluster 'null'"),
        ("models=null", "models: None is not valid"),
    ],
)
def test_a_value_that_cannot_be_is_named(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        rlflow.load(["recipe=fake", override], CONFIG_DIR)
    assert str(raised.value).startswith(message)


def test_a_list_that_is_too_long_has_a_fix() -> None:
    with pytest.raises(RecipeError, match=r"betas: \[1, 0.9, 0.9\] is not valid(.|\n)*Fix: use 2 items or less"):
        rlflow.load(["recipe=fake", "roles.actor.optimizer={betas: [1, 0.9, 0.9]}"], CONFIG_DIR)


@pytest.mark.parametrize("size", ["100000000000000000000000", "1e30"])
def test_a_group_that_cannot_be_is_named(size: str) -> None:
    with pytest.raises(RecipeError, match=r"^graph\.rollouts\.group_size: .* is not valid"):
        rlflow.compile(rlflow.load(["recipe=fake", f"graph.rollouts.group_size={size}"], CONFIG_DIR), "local")


def test_the_largest_sizes_can_be_planned() -> None:
    sizes = ["data.batch_size=1073741823", "graph.rollouts.group_size=2"]
    plan = rlflow.compile(rlflow.load(["recipe=grpo_tiny", *sizes]), "local")
    assert plan.prediction.step_seconds > 1e5


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"{", b"[]"])
def test_a_plan_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=rf"^plan: '{path}' (cannot be read|is not a plan)"):
        read_plan(path)


def test_data_that_is_no_text_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    from rlflow.data.loading import load_rows

    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff\xfe"}\n')
    data = rlflow.load(["recipe=fake", f"data.source={path}", "data.options={}"], CONFIG_DIR).data
    with pytest.raises(RecipeError, match=rf"^data\.source: line 2 of '{path}' is not UTF-8 \(byte 0xff, column "):
        load_rows(data, "split")


@pytest.mark.skipif(not ENDS_WITHOUT_SPACE.exists(), reason="no /dev/full")
def test_a_full_disk_is_named() -> None:
    with pytest.raises(OSError, match="No space left") as raised, ENDS_WITHOUT_SPACE.open("w") as file:
        file.write("x" * 100_000)
    said = str(storage_error(raised.value, "outputs/run"))
    assert said == "outputs/run: No space left on device.\n  Fix: free some space on that disk."


@pytest.mark.skipif(not ENDS_WITHOUT_SPACE.exists(), reason="no /dev/full")
def test_a_full_disk_under_lines_is_named() -> None:
    with pytest.raises(StorageError) as raised:
        append_lines(ENDS_WITHOUT_SPACE, ["x" * 100_000])
    assert str(raised.value) == f"{ENDS_WITHOUT_SPACE}: No space left on device.\n  Fix: free some space on that disk."


def test_a_full_disk_under_torch_is_named(tmp_path: Path) -> None:
    """A disk that is full for one file: the limit on its size."""
    import resource
    import signal

    import torch

    def save(folder: Path) -> None:
        torch.save({"weights": torch.zeros(100_000)}, folder / "state.pt")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="step-000001"):
            write_folder(tmp_path / "step-000001", save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == [], "nothing half written stays"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SafetensorError("I/O error: No space left on device (os error 28)"), StorageError),
        (RuntimeError("basic_ios::clear: iostream error"), StorageError),
        (EngineError("role actor: worker 0 on a died."), EngineError),
        (AssertionError("a mistake of rlflow's own"), AssertionError),
    ],
)
def test_only_disk_errors_become_storage_errors(error: Exception, expected: type[Exception], tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        raise error

    with pytest.raises(expected) as raised:
        write_folder(tmp_path / "step-000001", save)
    assert isinstance(raised.value, StorageError) == (expected is StorageError)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    yield tmp_path
    tmp_path.chmod(0o700)


def test_a_folder_that_may_not_be_written(
    read_only: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=grpo_tiny", "cluster=local", "dry_run=true", f"hydra.run.dir={read_only}/run"]
    monkeypatch.setattr(sys, "argv", ["rlflow", *words])
    assert main() in (1, 2)
    said = capsys.readouterr().err
    assert f"{read_only}/run" in said
    assert "Permission denied" in said
