"""The speed of a machine's kernels and links, and its memory, each measured in a second or two."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlflow.commands.doctor.checks.transfers import all_reduce_seconds
from rlflow.resources.layout import GIB
from rlflow.system import host_memory

if TYPE_CHECKING:
    import torch

_WIDTHS_CPU, _WIDTHS_GPU = (64, 128, 256, 512, 1024), (256, 512, 1024, 2048, 4096, 8192)
# Rows of the products: tokens of a micro-batch.
_ROWS_CPU, _ROWS_GPU = 1024, 8192
# Values of the arrays that are moved: those of a micro-batch, and more than any cache holds.
_VALUES = (2**18, 2**20, 2**24)
_LAUNCHES = 1000
_REPEATS, _MOST_REPEATS, _MEASURED_S = 5, 200, 0.3
# Bytes that two processes of a host exchange.
_SENT = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class MachineFigures:
    """The figures of a machine that need no model."""

    tflops: Mapping[int, float]
    """TFLOP/s of matrix products by their width."""
    memory_gb_s: float
    launch_s: float
    """Seconds of the smallest kernel."""
    link_gb_s: float | None
    """GB/s between two processes of the host, or two of its GPUs; None where that cannot be measured."""
    host_gib: float
    allocator_slack: float | None
    """On a GPU, memory that torch reserves for training as a share of what is allocated and freed."""

    @property
    def peak_tflops(self) -> float:
        """Return the best products."""
        return max(self.tflops.values())

    @property
    def narrow(self) -> float:
        """Return the width at which products reach half of the best speed, by interpolation."""
        return half_width(self.tflops)


def half_width(tflops: Mapping[int, float]) -> float:
    """Return the least-squares w of ``best / (1 + w / width)``, weighing every width the same."""
    best = max(tflops.values())
    pairs = [(1 / width, best / value - 1) for width, value in tflops.items()]
    return max(0.0, sum(x * y for x, y in pairs) / sum(x * x for x, y in pairs))


def measure(device: str) -> MachineFigures:
    """Measure the machine with one GPU, or its CPU."""
    import torch

    on_gpu = torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    widths, rows = (_WIDTHS_GPU, _ROWS_GPU) if on_gpu else (_WIDTHS_CPU, _ROWS_CPU)
    return MachineFigures(
        tflops={width: _product_tflops(rows, width, dtype, device) for width in widths},
        memory_gb_s=max(_moved_gb_s(values, dtype, device) for values in _VALUES),
        launch_s=_launch_seconds(device),
        link_gb_s=_link_gb_s(on_gpu),
        host_gib=host_memory.total_bytes() / GIB,
        allocator_slack=_allocator_slack(device) if on_gpu else None,
    )


def _product_tflops(rows: int, width: int, dtype: "torch.dtype", device: str) -> float:
    import torch

    # Random values: GPUs draw less power for equal ones, and are then faster than in training.
    left = torch.randn(rows, width, dtype=dtype, device=device)
    right = torch.randn(width, 4 * width, dtype=dtype, device=device)
    return 2 * rows * width * 4 * width / _fastest(lambda: left @ right, device) / 1e12


def _moved_gb_s(values: int, dtype: "torch.dtype", device: str) -> float:
    import torch

    source = torch.ones(values, dtype=dtype, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: torch.add(source, 1, out=target), device) / 1e9


def _launch_seconds(device: str) -> float:
    import torch

    tiny = torch.ones(8, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            torch.add(tiny, 1)

    return _fastest(launch, device) / _LAUNCHES


def _fastest(work: Callable[[], object], device: str) -> float:
    """Return the shortest of several times, after one that does not count. By default they take a while together."""
    import torch

    def timed() -> float:
        start = time.perf_counter()
        work()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    first = max(timed(), 1e-6)
    return min(timed() for _ in range(min(_MOST_REPEATS, max(_REPEATS, int(_MEASURED_S / first)))))


def _link_gb_s(on_gpu: bool) -> float | None:
    """Return the bandwidth of an exchange between two processes."""
    import torch

    if on_gpu and torch.cuda.device_count() < 2:
        return None
    return _SENT / all_reduce_seconds("cuda" if on_gpu else "cpu", ranks=2, elements=_SENT // 4) / 1e9


def _allocator_slack(device: str) -> float:
    """Return what torch reserves beyond what is allocated, while tensors of changing sizes come and go."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    sizes: Sequence[int] = [2**20 * (64 + 37 * step % 61) for step in range(64)]
    for first, second in itertools.pairwise(sizes):
        held = [torch.empty(size, dtype=torch.uint8, device=device) for size in (first, second, first // 2)]
        del held
    allocated = torch.cuda.max_memory_allocated(device)
    return (torch.cuda.max_memory_reserved(device) - before - allocated) / allocated
