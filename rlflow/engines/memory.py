"""The memory of an engine's process: the settings of torch's GPU allocator, the peak in use, and how to release it."""

import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rlflow.engines.base import EngineSpec
from rlflow.errors import EngineError
from rlflow.system import host_memory
from rlflow.system.compat.torch import allocator_settings, set_allocator_settings

# torch reads the first of these that is set. vLLM reads them in another order, so rlflow keeps only the last one.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OPTION = "expandable_segments"

PHASES: Mapping[str, str] = {
    **dict.fromkeys(("generate", "advance"), "generate"),
    **dict.fromkeys(("logprobs", "base_logprobs", "top_logprobs", "values", "evaluate"), "score"),
    "update": "update",
    "load_weights": "sync",
}
"""The phase of a role's work that each method of an engine belongs to."""


def wrap_calls(engine: object, during: Callable[[str], ContextDecorator]) -> None:
    """Make each call of one of these methods of the engine, from now on, inside the context of its name."""
    for method in PHASES:
        if hasattr(engine, method):
            setattr(engine, method, during(method)(getattr(engine, method)))


FULLEST = "memory/fullest"
"""The metric of the fullest GPU: the used share of its memory at the peak of a step."""


class PhasePeaks:
    """The peak memory of this process in each phase of its engines' work.

    On a GPU that is what torch reserves, on a CPU the resident memory of the process. Memory that it shares with others
    counts as the object store's, once for the host.
    """

    def __init__(self, device: str) -> None:
        self.bytes: dict[str, int] = {}
        """The largest peak by phase, over all calls so far."""
        self._share = 0.0
        self._device = device
        self._calls = 0
        self._lock = threading.Lock()

    def record(self, engine: object) -> None:
        """Record the peak of each call of the engine's methods from now on."""
        wrap_calls(engine, self._during)

    def take_share(self) -> float:
        """Return the largest used share of the GPU's memory in all calls since the last time; 0 on a CPU.

        It includes what other processes held when a call ended.
        """
        share, self._share = self._share, 0.0
        return share

    def take_metrics(self) -> dict[str, float]:
        """Return the metric of this share; none on a CPU."""
        share = self.take_share()
        return {FULLEST: share} if share else {}

    @contextmanager
    def _during(self, method: str) -> Iterator[None]:
        phase = PHASES[method]
        with self._lock:
            # Calls at the same time share their peak.
            if not self._calls:
                _start_peak(self._device)
            self._calls += 1
        try:
            yield
        finally:
            with self._lock, suppress(OSError, KeyError):
                self._calls -= 1
                used_by_others, peak, total = _memory_bytes(self._device)
                self.bytes[phase] = max(self.bytes.get(phase, 0), peak)
                if self._device != "cpu":
                    self._share = max(self._share, min(1.0, (used_by_others + peak) / total))


_earlier_peaks: dict[str, int] = {}
"""The peak of earlier calls by device, since ``memory_share`` was last asked; later calls reset torch's own peak."""


def _start_peak(device: str) -> None:
    """Reset the peak, and keep the peak so far for ``memory_share``."""
    with suppress(OSError, KeyError):
        _earlier_peaks[device] = max(_earlier_peaks.get(device, 0), _memory_bytes(device)[1])
        _reset_peak(device)


class TunableEngine:
    """A base class for engines whose micro-batch size may change between calls.

    A subclass reads ``_spec.layout.micro_batch_tokens`` on every call, and runs its passes inside ``within_memory``.
    """

    _spec: EngineSpec
    _peak_other_bytes = 0
    """The most memory that other processes held since the last call of ``memory_share``."""

    def set_micro_batch_tokens(self, tokens: int) -> None:
        """Change the size of micro-batches from the next call on; results change by rounding alone."""
        self._spec = replace(self._spec, layout=replace(self._spec.layout, micro_batch_tokens=tokens))
        # The peak of passes of another size says nothing about passes of this one.
        TunableEngine.release_memory(self)
        if self._spec.device != "cpu":
            _earlier_peaks.pop(self._spec.device, None)
            _reset_peak(self._spec.device)

    def release_memory(self) -> None:
        """Give the GPU memory that torch caches back to the driver, for other processes on the GPU."""
        import torch

        if torch.device(self._spec.device).type == "cuda":
            # Reference cycles may still hold tensors.
            gc.collect()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def memory_share(self) -> float:
        """Return the share of the device's memory that was in use at the peak since the last call; 0 if unknown.

        That is this process's peak, plus what other processes held when its passes ended: roles that share the GPU
        sleep meanwhile. On a CPU the device's memory is the host's.
        """
        try:
            _, peak, total = _memory_bytes(self._spec.device)
        except (OSError, KeyError):
            return 0.0
        peak = max(peak, _earlier_peaks.pop(self._spec.device, 0))
        share = min(1.0, (self._peak_other_bytes + peak) / total)
        self._peak_other_bytes = 0
        _reset_peak(self._spec.device)
        return share

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """Wrap the passes over a batch: record the memory in use, and turn running out of it into an EngineError."""
        import torch

        try:
            yield
        except torch.OutOfMemoryError as error:
            tokens = self._spec.layout.micro_batch_tokens
            fact = f"role {self._spec.role}: its GPU ran out of memory with micro_batch_tokens {tokens}"
            fix = f"roles.{self._spec.role}.micro_batch_tokens={max(1, tokens // 2)}"
            raise EngineError(f"{fact}.\n  Fix: {fix}, with resume=true from the last checkpoint.") from error
        with suppress(OSError, KeyError):
            self._peak_other_bytes = max(self._peak_other_bytes, _memory_bytes(self._spec.device)[0])


def _memory_bytes(device: str) -> tuple[int, int, int]:
    """Return the bytes that other processes hold now, this process's peak, and the total of the device.

    Raises OSError or KeyError where the system does not report them.
    """
    import torch

    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        process_bytes, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    else:
        free, total = host_memory.free_bytes(), host_memory.total_bytes()
        process = host_memory.read_amounts("/proc/self/status")
        # Pages of the object store stay resident once they are read, so they were part of the peak as well.
        process_bytes, peak = (process[name] - process["RssShmem"] for name in ("VmRSS", "VmHWM"))
    return max(0, total - free - process_bytes), peak, total


def _reset_peak(device: str) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def enable_expandable_segments(device: str) -> None:
    """Turn on expandable segments, which keep memory from fragmenting where micro-batches differ in size.

    Does nothing on a CPU, or where the environment already sets the option. Call it before torch's first allocation
    on a GPU.
    """
    settings = _environment_settings()
    if device != "cpu" and _OPTION not in settings:
        _write_environment(set_expandable_segments(settings, True))


def forbid_expandable_segments() -> None:
    """Turn expandable segments off for this process and its children, even if the environment asks for them.

    vLLM's sleep mode has its own allocator, which does not work with them.
    """
    settings = _environment_settings()
    if _OPTION in settings:
        _write_environment(set_expandable_segments(settings, False))


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Allocate GPU memory in plain segments, which other processes can open by CUDA IPC."""
    before = allocator_settings()
    if _OPTION not in before:
        yield
        return
    # torch resets every option that new settings do not name, so the others are written again.
    set_allocator_settings(set_expandable_segments(before, False))
    try:
        yield
    finally:
        set_allocator_settings(before)


def set_expandable_segments(settings: str, enabled: bool) -> str:
    """Return the allocator settings with expandable segments on or off, and all other options unchanged."""
    options = [option for option in settings.split(",") if option and option.partition(":")[0].strip() != _OPTION]
    return ",".join([*options, f"{_OPTION}:{enabled}"])


def _environment_settings() -> str:
    return next((value for name in VARIABLES if (value := os.environ.get(name))), "")


def _write_environment(settings: str) -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ[VARIABLES[-1]] = settings
