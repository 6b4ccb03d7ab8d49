"""How ranks wait for the one that converts a checkpoint, with threads for ranks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event

import pytest
import torch

from rlflow.engines.sharded import resharding
from rlflow.engines.sharded.resharding import UNIVERSAL, resharded
from rlflow.errors import EngineError
from tests.helpers import spec

LIMIT_S = 20


@pytest.fixture
def others_look(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set as soon as a rank looks for what rank 0 tells, and does not wait in an exchange."""
    looking = Event()
    together = Barrier(2)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: together.wait(LIMIT_S))
    monkeypatch.setattr("rlflow.engines.sharded.resharding.time.sleep", lambda seconds: looking.set())
    return looking


def restore(rank: int, folder: Path) -> list[str]:
    """What is in the folder meanwhile."""
    with resharded(replace(spec(), rank=rank, world_size=2), folder, "tag", 1):
        return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("reason", ["", "no space left"])
def test_all_hear_of_it(others_look: Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str) -> None:
    def convert(source: Path, target: Path, shards: int) -> str:
        assert others_look.wait(LIMIT_S), "another rank waits in an exchange"
        assert not target.exists(), "of a run that was killed"
        target.mkdir()
        (tmp_path / "latest_universal").touch()
        return reason

    monkeypatch.setattr(resharding, "_converted", convert)
    (tmp_path / UNIVERSAL).mkdir()
    (tmp_path / "universal.outcome").write_text("of a run that was killed")
    with ThreadPoolExecutor(2) as ranks:
        calls = [ranks.submit(restore, rank, tmp_path) for rank in range(2)]
        for call in calls:
            if reason:
                error = f"role actor: '{tmp_path}' cannot be restored (no space left)."
                assert str(call.exception(LIMIT_S)) == error
            else:
                assert UNIVERSAL in call.result(LIMIT_S)
    assert list(tmp_path.iterdir()) == []


def test_they_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resharding, "_LIMIT_S", 0.0)
    with pytest.raises(EngineError, match=r"rank 0 has not resharded '.*' within 0 h"):
        resharding._told(spec(), tmp_path)
