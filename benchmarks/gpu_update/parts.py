"""Times of the parts of an update on a GPU, one line each: ``python -m benchmarks.gpu_update.parts [DEVICE]``.

Each time is the median of a few runs, measured on the host between two synchronizations.
Shapes: T tokens, H hidden size, V vocabulary.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCABULARY, HEAD_TOKENS, WIDTHS = 151_936, 8192, (896, 3584)
GIB = 2**30
TOTAL_S = 60.0
_REPEATS = 5


def say(name: str, value: float, unit: str) -> None:
    print(f"part {name}: {value:.4g} {unit}", flush=True)


def median_ms(call: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Return the median time of a call, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times[1:])


def garbage() -> None:
    """Time a full collection, in a process that has imported what an engine imports, and after ``gc.freeze``."""
    import transformers

    for name in ("AutoModelForCausalLM", "Qwen2ForCausalLM", "Trainer"):
        getattr(transformers, name)
    say("objects that the collector knows", len(gc.get_objects()), "objects")
    say("gc.collect after the imports", median_ms(gc.collect), "ms")
    gc.freeze()
    say("gc.collect after gc.freeze", median_ms(gc.collect), "ms")
    gc.unfreeze()


def products(device: str) -> None:
    """Time matrix products [16384, width] x [width, width] in bfloat16."""
    for width in (512, 896, 1024, 1536, 2048, 3584, 4096, 8192):
        left = torch.randn(16_384, width, device=device, dtype=torch.bfloat16)
        right = torch.randn(width, width, device=device, dtype=torch.bfloat16)
        count = max(1, 2048 // width) * 10

        def multiply(left: Tensor = left, right: Tensor = right, count: int = count) -> None:
            for _ in range(count):
                left @ right

        say(f"bf16 product, width {width}", 2e-9 * 16_384 * width**2 * count / median_ms(multiply), "TFLOP/s")


def copies(device: str) -> None:
    """Time copies within the GPU, and of 256 MiB between the GPU and pinned memory."""
    source = torch.empty(4 * GIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    say("copy on the GPU, read and written", 8 * GIB / 1e6 / median_ms(lambda: target.copy_(source)), "GB/s")
    size = GIB // 4
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    chunk = source[:size]
    say("256 MiB to pinned memory", size / 1e6 / median_ms(lambda: pinned.copy_(chunk, non_blocking=True)), "GB/s")
    say("256 MiB from pinned memory", size / 1e6 / median_ms(lambda: chunk.copy_(pinned, non_blocking=True)), "GB/s")
    pageable = torch.empty(size, dtype=torch.uint8)
    say("256 MiB to pageable memory", size / 1e6 / median_ms(lambda: pageable.copy_(chunk), 3), "GB/s")


def mapping(device: str) -> None:
    """Time ``empty_cache`` and taking the memory again, in one piece and in pieces of 20 MiB."""
    torch.cuda.empty_cache()
    for gib in (8, 32, 64):
        if torch.cuda.mem_get_info(device)[0] < (gib + 4) * GIB:
            continue
        for name, piece in (("one piece", gib * GIB), ("pieces of 20 MiB", 20 * 2**20)):
            began = time.perf_counter()
            tensors = [torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(gib * GIB // piece)]
            torch.cuda.synchronize()
            say(f"map {gib} GiB, {name}", 1000 * (time.perf_counter() - began), "ms")
            tensors.clear()
            began = time.perf_counter()
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            say(f"empty_cache of {gib} GiB, {name}", 1000 * (time.perf_counter() - began), "ms")


def heads(device: str) -> None:
    """Time forward and backward pass of output layers: rlflow's, the composite's, and Liger's where it is installed."""
    for width in WIDTHS:
        hidden = torch.randn(HEAD_TOKENS, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(VOCABULARY, width, device=device, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
        targets = torch.randint(VOCABULARY, (HEAD_TOKENS,), device=device)
        systems = {"rlflow": _rlflow_head, "composite": _composite_head, "Liger": _liger_head}
        for name, system in systems.items():
            try:
                call = system(hidden, weight, targets)
                milliseconds = median_ms(lambda call=call: call().backward())  # type: ignore[misc]
            except Exception as error:  # a part that fails must not hide the others
                print(f"part head of {name}, width {width}: {type(error).__name__}: {error}"[:300], flush=True)
                continue
            finally:
                hidden.grad = weight.grad = None
            rate = 6e-9 * HEAD_TOKENS * VOCABULARY * width / milliseconds
            say(f"head of {name}, width {width}, {HEAD_TOKENS} tokens, forward and backward", milliseconds, "ms")
            say(f"head of {name}, width {width}, without what is computed again", rate, "TFLOP/s")


def _rlflow_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    from rlflow.engines.causal_lm.output_layer import score_targets

    return lambda: score_targets(hidden, weight, None, targets, 1.0, "unused")[:, 0].sum()


def _composite_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    from benchmarks.gpu_update.composite import HEAD_CHUNK, head_logprobs

    compiled = torch.compile(head_logprobs, dynamic=True)

    def call() -> Tensor:
        chunks = zip(torch.split(hidden, HEAD_CHUNK), torch.split(targets, HEAD_CHUNK), strict=True)
        return torch.cat([compiled(chunk, weight, ids) for chunk, ids in chunks]).sum()

    return call


def _liger_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    loss: Any = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda: loss(weight, hidden, targets)


def gathers(device: str) -> None:
    """Time attention of one layer of 0.5B and 7B over rows of 612 tokens, with q, k and v gathered and without."""
    from benchmarks.gpu_update.composite import attend

    rows, length = 26, 612
    tokens = rows * length
    ends = torch.arange(0, tokens + 1, length, device=device, dtype=torch.int32)
    places = torch.arange(tokens, device=device)
    for name, heads, key_heads, size in (("0.5B", 14, 2, 64), ("7B", 28, 4, 128)):
        query, key, value = (
            torch.randn(1, count, tokens, size, device=device, dtype=torch.bfloat16, requires_grad=True)
            for count in (heads, key_heads, key_heads)
        )

        def run(gathered: bool, inputs: tuple[Tensor, ...] = (query, key, value), size: int = size) -> None:
            q, k, v = (x.index_select(2, places) if gathered else x for x in inputs)
            out = attend(None, q, k, v, None, size**-0.5, ends, 1024)[0]
            out = out.index_select(1, places) if gathered else out
            torch.autograd.grad(out.sum(), inputs)

        for gathered in (False, True):
            label = "gathered" if gathered else "in place"
            milliseconds = median_ms(lambda gathered=gathered, run=run: run(gathered))  # type: ignore[misc]
            say(f"attention of a layer of {name}, {tokens} tokens, q, k and v {label}", milliseconds, "ms")


def main() -> int:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda:0"
    torch.cuda.set_device(device)
    began = time.monotonic()
    print(f"part GPU: {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    steps = (garbage, lambda: products(device), lambda: copies(device), lambda: gathers(device))
    for step in (*steps, lambda: heads(device), lambda: mapping(device)):
        if time.monotonic() - began > TOTAL_S:
            print(f"part: the {TOTAL_S:.0f} s are used up", flush=True)
            break
        try:
            step()
        except Exception as error:  # a part that fails must not hide the others
            print(f"part failed: {type(error).__name__}: {error}"[:300], flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
