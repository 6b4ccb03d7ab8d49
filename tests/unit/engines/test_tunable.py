"""What an engine that can be tuned says of itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlflow.engines.causal_lm import tunable
from rlflow.engines.causal_lm.tunable import Tunable
from tests.helpers import spec


class Engine(Tunable):
    def __init__(self, world_size: int = 1) -> None:
        self._spec = replace(spec(micro_batch_tokens=4096), world_size=world_size)

    @property
    def tokens(self) -> int:
        return self._spec.layout.micro_batch_tokens


def test_the_memory_of_a_step_is_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = tunable._figures
    # Others on this machine take and give memory back meanwhile.
    host = {"MemAvailable": 60 * 2**30, "MemTotal": 64 * 2**30}
    monkeypatch.setattr(tunable, "_figures", lambda path: host if path == "/proc/meminfo" else read(path))
    engine = Engine()
    engine.memory_share()
    assert 64 * engine.memory_share() == pytest.approx(4, abs=0.3)
    block = np.ones(2**27)  # 1 GiB
    del block
    assert 64 * engine.memory_share() == pytest.approx(5, abs=0.3)
    assert 64 * engine.memory_share() == pytest.approx(4, abs=0.3)


def test_where_memory_runs_out_less_is_done_at_once() -> None:
    engine = Engine()

    def work() -> int:
        if engine.tokens > 1500:
            raise torch.OutOfMemoryError("out of memory")
        return engine.tokens

    assert engine.within_memory(work) == 1024
    assert engine.memory_share() == 1
    assert engine.memory_share() < 1


def test_ranks_that_work_together_do_not_try_again() -> None:
    def work() -> int:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Engine(world_size=2).within_memory(work)
    with pytest.raises(torch.OutOfMemoryError):
        Engine().within_memory(work)
