import os
from pathlib import Path

import pytest

from rlflow.rewards import processes


@pytest.mark.parametrize(
    ("share", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9000000 100000", 8), (None, 8)],
)
def test_processors(share: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpu.max"
    if share is not None:
        file.write_text(share)
    monkeypatch.setattr(processes, "_CGROUP_CPU_MAX", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert processes.num_usable_cpus() == expected
