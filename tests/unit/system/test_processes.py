import os
import subprocess
import threading
from pathlib import Path

import pytest

from rlflow.system import processes


@pytest.mark.parametrize(
    ("share", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9000000 100000", 8), (None, 8)],
)
def test_usable_cpus_are_those_of_the_cgroup(
    share: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    if share is not None:
        file.write_text(share)
    monkeypatch.setattr(processes, "_CGROUP_CPU_MAX", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert processes.num_usable_cpus() == expected


@pytest.mark.parametrize(("share", "expected"), [("1", 1), ("100000", os.cpu_count()), ("2,4", os.cpu_count())])
def test_an_engine_has_its_share_of_the_cpus(share: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", share)
    monkeypatch.setattr(processes, "num_usable_cpus", os.cpu_count)
    assert processes.num_own_cpus() == expected


def test_a_thread_that_ends_meanwhile_hides_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    read, stop = Path.read_text, threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()

    def read_without_the_thread(path: Path) -> str:
        if path.parent.name == str(thread.native_id):
            raise ProcessLookupError
        return read(path)

    monkeypatch.setattr(Path, "read_text", read_without_the_thread)
    with subprocess.Popen(["sleep", "60"]) as child:
        found = processes.children(os.getpid())
        child.kill()
    stop.set()
    thread.join()
    assert child.pid in found
