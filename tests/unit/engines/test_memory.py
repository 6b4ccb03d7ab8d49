"""The memory that an engine reports for tuning."""

from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
import torch

from rlflow.engines import memory
from rlflow.engines.memory import PhasePeaks, TunableEngine
from rlflow.errors import EngineError
from rlflow.system import host_memory
from tests.helpers import spec

GIB = 2**30


class Engine(TunableEngine):
    def __init__(self) -> None:
        self._spec = spec(micro_batch_tokens=4096)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Simulate a host of 64 GiB, whatever other processes of this machine use."""
    used = {"by others": 0}
    free = host_memory.free_bytes
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 64 * GIB)
    own = "/proc/self/status"
    read_amounts = host_memory.read_amounts
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 64 * GIB - used["by others"] - read_amounts(own)["VmRSS"])
    assert free() > 0
    return used


def pass_over(engine: Engine, gib: float = 0) -> None:
    with engine.within_memory():
        np.ones(int(gib * 2**27))


@pytest.mark.slow
def test_the_memory_of_a_step_is_seen_once(host: dict[str, int]) -> None:
    engine = Engine()
    engine.memory_share()
    pass_over(engine)
    least = 64 * engine.memory_share()
    pass_over(engine, gib=1)
    assert 64 * engine.memory_share() == pytest.approx(least + 1, abs=0.3)
    pass_over(engine)
    assert 64 * engine.memory_share() == pytest.approx(least, abs=0.3)


def test_others_count_as_they_are_while_it_works(host: dict[str, int]) -> None:
    engine = Engine()
    engine.memory_share()
    pass_over(engine)
    alone = 64 * engine.memory_share()
    for gib in (2, 8, 4):
        host["by others"] = gib * GIB
        pass_over(engine)
    # It sleeps, and another role has the memory.
    host["by others"] = 60 * GIB
    assert 64 * engine.memory_share() == pytest.approx(alone + 8, abs=0.3)
    host["by others"] = 0
    pass_over(engine)
    assert 64 * engine.memory_share() == pytest.approx(alone, abs=0.3)


class Reader:
    def update(self, shared: memoryview | None) -> None:
        own = np.ones(2**24)
        if shared is not None:
            np.frombuffer(shared, np.int8)[:] = int(own[0])


def test_memory_that_is_shared_with_others_does_not_count() -> None:
    def peak(shared: memoryview | None) -> int:
        peaks, reader = PhasePeaks("cpu"), Reader()
        peaks.record(reader)
        reader.update(shared)
        return peaks.bytes["update"]

    alone = peak(None)
    held = SharedMemory(create=True, size=2**28)
    try:
        assert peak(held.buf) == pytest.approx(alone, abs=2**25)
    finally:
        held.close()
        held.unlink()


def test_the_share_of_a_gpu_counts_other_processes_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each is the memory of other processes, the peak of this one, and the memory of the GPU.
    measurements = iter([(2, 5, 10), (1, 3, 10), (9, 9, 10)])
    monkeypatch.setattr(memory, "_memory_bytes", lambda device: next(measurements))
    monkeypatch.setattr(memory, "_start_peak", lambda device: None)
    peaks, reader = PhasePeaks("cuda:0"), Reader()
    peaks.record(reader)
    reader.update(None)
    reader.update(None)
    assert (peaks.take_share(), peaks.take_share()) == (0.7, 0.0)
    reader.update(None)
    assert peaks.take_share() == 1.0


def test_running_out_of_memory_is_an_error_with_a_fix() -> None:
    with pytest.raises(EngineError) as caught, Engine().within_memory():
        raise torch.OutOfMemoryError("out of memory")
    assert str(caught.value) == (
        "role actor: its GPU ran out of memory with micro_batch_tokens 4096.\n"
        "  Fix: roles.actor.micro_batch_tokens=2048, with resume=true from the last checkpoint."
    )


def test_a_container_has_what_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    of_the_machine = host_memory.total_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.total_bytes() == of_the_machine
    for name, text in {"max": "10000", "current": "9000", "stat": "anon 5000\ninactive_file 500\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert (host_memory.total_bytes(), host_memory.free_bytes()) == (10000, 1500)
