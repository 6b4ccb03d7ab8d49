"""Micro-batches whose size may change between steps, and the memory that a step needed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rlflow.engines.base import EngineSpec

Result = TypeVar("Result")

_KIB = 2**10


class Tunable:
    """Of an engine that reads ``_spec.layout.micro_batch_tokens`` whenever it works."""

    _spec: EngineSpec
    _ran_out = False

    def set_micro_batch_tokens(self, tokens: int) -> None:
        """From the next call on. It changes no result but by rounding."""
        self._spec = replace(self._spec, layout=replace(self._spec.layout, micro_batch_tokens=tokens))

    def memory_share(self) -> float:
        """Of the GPU's memory, or the host's, what was in use at the peak since the last call: of this process at its
        peak, of others now. 1 where it ran out; 0 where it cannot be known."""
        ran_out, self._ran_out = self._ran_out, False
        return 1.0 if ran_out else min(0.999, _share(self._spec.device))

    def within_memory(self, work: Callable[[], Result]) -> Result:
        """What ``work`` gives; where a GPU's memory runs out it is done again with half the tokens at a time.

        Not where ranks work together: the others are waiting for this one in the middle of a pass.
        """
        import torch

        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                tokens = self._spec.layout.micro_batch_tokens
                if self._spec.world_size > 1 or tokens <= 1:
                    raise
            # Outside the handler, whose traceback holds what the pass has made.
            torch.cuda.empty_cache()
            self._ran_out = True
            self.set_micro_batch_tokens(tokens // 2)


def _share(device: str) -> float:
    import torch

    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        here, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float((total - free + peak - here) / total)
    try:
        host, process = _figures("/proc/meminfo"), _figures("/proc/self/status")
        free, total = host["MemAvailable"], host["MemTotal"]
        here, peak = process["VmRSS"], process["VmHWM"]
    except (OSError, KeyError):  # not Linux
        return 0.0
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return (total - free + peak - here) / total


def _figures(path: str) -> dict[str, int]:
    """Bytes by name."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines if len(words) == 3 and words[2] == "kB"}
