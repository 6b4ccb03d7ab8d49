"""Micro-batches whose size may change between steps, and the memory that they needed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rlflow import host_memory
from rlflow.engines.base import EngineSpec
from rlflow.errors import EngineError


class Tunable:
    """Of an engine that reads ``_spec.layout.micro_batch_tokens`` whenever it works, ``within_memory``."""

    _spec: EngineSpec
    _others = 0
    """Bytes that other processes held, the most since the last call of ``memory_share``."""

    def set_micro_batch_tokens(self, tokens: int) -> None:
        """From the next call on. It changes no result but by rounding."""
        self._spec = replace(self._spec, layout=replace(self._spec.layout, micro_batch_tokens=tokens))
        # What passes of another size needed counts for none of this one.
        Tunable.release_memory(self)
        if self._spec.device != "cpu":
            _begin_anew(self._spec.device)

    def release_memory(self) -> None:
        """Give back to the driver the GPU memory that torch caches, for other processes on the GPU."""
        import torch

        if torch.device(self._spec.device).type == "cuda":
            # Cycles of Python objects may still hold tensors.
            gc.collect()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def memory_share(self) -> float:
        """Of the GPU's memory, or the host's, what this process held at its peak since the last call, and others when
        its passes ended: roles that share a GPU sleep then. 0 where it cannot be known."""
        try:
            _, peak, total = _memory(self._spec.device)
        except (OSError, KeyError):
            return 0.0
        share = min(1.0, (self._others + peak) / total)
        self._others = 0
        _begin_anew(self._spec.device)
        return share

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """For the passes over a batch. Raises EngineError where the GPU's memory does not suffice."""
        import torch

        try:
            yield
        except torch.OutOfMemoryError as error:
            tokens = self._spec.layout.micro_batch_tokens
            fact = f"role {self._spec.role}: its GPU has no memory for micro_batch_tokens {tokens}"
            fix = f"roles.{self._spec.role}.micro_batch_tokens={max(1, tokens // 2)}"
            raise EngineError(f"{fact}.\n  Fix: {fix}, with resume=true from the last checkpoint.") from error
        with suppress(OSError, KeyError):
            self._others = max(self._others, _memory(self._spec.device)[0])


def _memory(device: str) -> tuple[int, int, int]:
    """Bytes: of other processes now, of this one at its peak, and of all. Raises OSError and KeyError where unknown."""
    import torch

    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    else:
        free, total = host_memory.free_bytes(), host_memory.total_bytes()
        process = host_memory.figures("/proc/self/status")
        own, peak = process["VmRSS"], process["VmHWM"]
    return max(0, total - free - own), peak, total


def _begin_anew(device: str) -> None:
    """The peak."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
