"""Free memory of a GPU as another process sees it, which is what decides whether that process starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

GIB = 2**30
_PATIENCE_S = 60.0


class FreeMemory(Protocol):
    """A function that returns the GiB that are free right now."""

    def __call__(self) -> float: ...


@contextmanager
def seen_from_another_process(device: str) -> Iterator[FreeMemory]:
    """Yield a function that asks another process for the free memory of ``device``, in GiB."""
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(device, there), daemon=True)
    process.start()

    def free() -> float:
        here.send(True)
        if not here.poll(_PATIENCE_S):
            raise TimeoutError(f"another process did not answer within {_PATIENCE_S:g} s")
        return float(here.recv())

    # Its own context takes memory: that must be there before the first comparison.
    free()
    try:
        yield free
    finally:
        here.send(False)
        process.join(_PATIENCE_S)


def _answer(device: str, questions: Any) -> None:
    import torch

    from rlflow import host_memory

    while questions.recv():
        on_gpu = device.startswith("cuda")
        questions.send((torch.cuda.mem_get_info(device)[0] if on_gpu else host_memory.free_bytes()) / GIB)
