"""A process that measures one system with one model: ``python -m benchmarks.gpu_update.worker REQUEST``.

It imports its packages, prints ``ready``, waits for a line of input, and then prints one line of JSON for each batch.
"""

import contextlib
import gc
import importlib
import json
import os
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_update.arms import PACKAGES, Arm, build
from benchmarks.gpu_update.cases import DATA, MODELS, TINY_DATA, Rows, flops, rows_of

MARK = "RESULT "
WARMUPS, REPEATS, MIN_REPEATS = 2, 5, 3
# The time of all repeats after which there are no more.
_REPEATS_S = 6.0
_LONGEST_KERNELS, _NAME_LENGTH = 20, 70
_SYNC_WARNING = "called a synchronizing CUDA operation"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The system, the model and the batches that a worker measures."""

    arm: str
    model: str
    data: list[str]
    folder: str
    """The model's weights."""
    device: str = "cuda:0"
    dtype: str = "bfloat16"
    rlflow: str | None = None
    """Another checkout of rlflow, for the arm ``before``."""
    micro_batch_tokens: int | None = None
    compiled: bool = True
    seconds: float = 300.0
    """The worker starts no further batch after this time."""


@dataclass(kw_only=True)
class Result:
    """One system, model and batch."""

    arm: str
    model: str
    data: str
    error: str = ""
    note: str = ""
    loss: float = float("nan")
    grad_norm: float = float("nan")
    """The norm in the first update, before clipping."""
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    """The useful tokens: every row with its own prompt."""
    computed_tokens: int = 0
    micro_batches: int = 0
    flops: float = 0.0
    """The operations for the useful tokens."""
    computed_flops: float = 0.0
    peak_gib: float = 0.0
    kernels: int = 0
    """The number of launches in one update."""
    syncs: int = 0
    """The operations of one update that made the host wait for the GPU."""
    longest_kernels: list[tuple[str, int, float, float]] = field(default_factory=list)
    """Name, count, milliseconds and share of all GPU time, of one update."""
    build_s: float = 0.0
    first_s: float = 0.0
    """The first update, which compiles."""

    @property
    def median_s(self) -> float:
        """Return the median time of an update; NaN without any."""
        return statistics.median(self.seconds) if self.seconds else float("nan")


def run(request: Request, report: Callable[[Result], None]) -> None:
    """Measure all batches of a request; halve the micro-batches where memory runs out."""
    began = time.monotonic()
    shape = MODELS[request.model]
    lengths = TINY_DATA if request.model == "tiny" else DATA
    tokens = request.micro_batch_tokens or shape.micro_batch_tokens
    remaining, compiled, note = list(request.data), request.compiled, ""
    while remaining and time.monotonic() - began < request.seconds:
        arm: Arm | None = None
        failure = ""
        built = time.monotonic()
        try:
            arm = build(request.arm, Path(request.folder), request.device, request.dtype, tokens, compiled)
            _synchronize(request.device)
            build_s = time.monotonic() - built
            while remaining and time.monotonic() - began < request.seconds:
                data = remaining[0]
                result = Result(arm=request.arm, model=request.model, data=data, note=note, build_s=build_s)
                rows = rows_of(lengths[data], shape.vocab_size)
                _measure(arm, rows, request.device, result)
                result.tokens = rows.tokens
                result.flops = flops(shape, rows, result.tokens)
                result.computed_flops = flops(shape, rows, result.computed_tokens)
                report(result)
                remaining.pop(0)
                _release(request.device)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        if not failure:
            break
        del arm  # the exception and its frames are gone by now, so the memory can be freed
        _release(request.device)
        if "out of memory" in failure and tokens > 1024:
            tokens //= 2
            note = f"micro-batches of {tokens} tokens"
        elif compiled and request.arm == "composite":
            compiled, note = False, f"not compiled ({failure[:300]})"
        else:
            report(Result(arm=request.arm, model=request.model, data=remaining.pop(0), error=failure[:2000]))


def _measure(arm: Arm, rows: Rows, device: str, result: Result) -> None:
    on_gpu = device.startswith("cuda")
    batch = arm.prepare(rows)
    if on_gpu:
        import torch

        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < WARMUPS + REPEATS:
        _synchronize(device)
        began = time.perf_counter()
        loss, norm = arm.update(batch)
        _synchronize(device)
        times.append(time.perf_counter() - began)
        if len(times) == 1:
            result.loss, result.grad_norm, result.first_s = loss, norm, times[0]
        repeats = times[WARMUPS:]
        if len(repeats) >= MIN_REPEATS and sum(repeats) > _REPEATS_S:
            break
    result.seconds = times[WARMUPS:]
    if on_gpu:
        result.peak_gib = torch.cuda.max_memory_reserved() / 2**30
    with _counting_inputs(arm, result):
        _inspect(arm, batch, on_gpu, result)


@contextlib.contextmanager
def _counting_inputs(arm: Arm, result: Result) -> Iterator[None]:
    """Count the passes of the model, and the tokens that go into them, padding included."""

    def count(_: Any, inputs: Any, output: Any) -> None:
        result.micro_batches += 1
        result.computed_tokens += output.shape[:-1].numel()

    handle = arm.module.get_input_embeddings().register_forward_hook(count)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()


def _inspect(arm: Arm, batch: Any, on_gpu: bool, result: Result) -> None:
    """Take one more update, with all kernels and synchronizations recorded."""
    if not on_gpu:
        arm.update(batch)
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                arm.update(batch)
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    result.syncs = sum(_SYNC_WARNING in str(warning.message) for warning in caught)
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, milliseconds in _kernels(profiler):
        totals[name][0] += 1
        totals[name][1] += milliseconds
    result.kernels = int(sum(count for name, (count, _) in totals.items() if not name.startswith(("Memcpy", "Memset"))))
    everything = sum(milliseconds for _, milliseconds in totals.values()) or 1.0
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:_LONGEST_KERNELS]
    result.longest_kernels = [
        (name[:_NAME_LENGTH], int(count), milliseconds, milliseconds / everything)
        for name, (count, milliseconds) in longest
    ]


def _kernels(profiler: Any) -> Iterator[tuple[str, float]]:
    """Yield the name and the milliseconds of everything that ran on the GPU."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    # The list of torch's own events takes long to build for tens of thousands of kernels.
    for event in profiler.profiler.kineto_results.events():
        is_annotation = getattr(event, "is_user_annotation", lambda: False)()
        if event.device_type() == DeviceType.CUDA and not is_annotation:
            yield event.name(), event.duration_ns() / 1e6


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def _release(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def main() -> int:
    request = Request(**json.loads(sys.argv[1]))
    # Whatever a library prints must not mix with the results.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(result: Result) -> None:
        results.write(f"{MARK}{json.dumps(asdict(result))}\n")

    if request.rlflow is not None:
        sys.path.insert(0, request.rlflow)
    for package in PACKAGES[request.arm]:
        try:
            importlib.import_module(package)
        except Exception as error:  # a broken installation raises errors of any kind
            text = f"{type(error).__name__}: {error}"[:300]
            report(Result(arm=request.arm, model=request.model, data="", error=f"cannot import {package}: {text}"))
            return 0
    results.write("ready\n")
    if sys.stdin.readline():  # nothing where the comparison has ended
        run(request, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
