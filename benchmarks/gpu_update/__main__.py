"""Compare one optimizer step of GRPO on one GPU: rlflow, rlflow before, DeepSpeed, TRL, and a composite.

``python -m benchmarks.gpu_update [--before CHECKOUT] [--minutes 8] [--models 0.5B,1.5B,7B-slice] [--arms ...]
[--profile] [--parts] [--out FOLDER] [--json FILE]``

All systems load the same random weights in bfloat16 and take the same rows, with float32 master weights. The loss is
GRPO's clipped one without KL, averaged over all response tokens. D1 has equal lengths, D2 log-normal ones, D3 long
prompts. A system whose loss or gradient norm in the first update differs by more than 2 % from the median has no time.
An update is timed from the batch in host memory to the finished optimizer step.

``x composite`` compares useful tokens: those of every row with its own prompt. MFU counts 6 operations for each
parameter of the layers' matrices and token, 6 for each of the head's and response token, and causal attention of every
row; no recomputation, and 989.4 TFLOP/s as the peak.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.gpu_update.arms import PACKAGES
from benchmarks.gpu_update.cases import MODELS
from benchmarks.gpu_update.processes import Waiting, save_models
from benchmarks.gpu_update.report import figures_and_goals, kernel_lines, line, table
from benchmarks.gpu_update.worker import Request, Result
from benchmarks.reporting import finish

ARMS = list(PACKAGES)
# The runs where nothing is chosen, the most important first.
_ALL, _LARGER = ["D1", "D2", "D3"], ["composite", "rlflow", "before", "trl+liger"]
RUNS = [
    *(("0.5B", arm, _ALL) for arm in ("composite", "rlflow", "trl+liger", "before", "deepspeed", "trl")),
    *(("7B-slice", arm, ["D1"]) for arm in _LARGER[:3]),
    *(("1.5B", arm, ["D2"]) for arm in _LARGER),
    *(("tiny", arm, _ALL) for arm in ARMS),
]
# The most seconds of one system with one model.
_ARM_S = 150.0


def requests(arguments: argparse.Namespace, folder: Path) -> Iterator[Request]:
    """Yield what is measured, in order."""
    for model, arm, data in RUNS:
        chosen = [name for name in (arguments.data or data) if name in _ALL]
        if model not in arguments.models or arm not in arguments.arms or (arm == "before" and not arguments.before):
            continue
        yield Request(
            arm=arm,
            model=model,
            data=chosen,
            folder=str(folder / model),
            device=arguments.device,
            dtype=arguments.dtype,
            rlflow=str(arguments.before.resolve()) if arm == "before" else None,
            micro_batch_tokens=arguments.micro_batch_tokens,
            compiled=not arguments.eager,
        )


def compare(arguments: argparse.Namespace, folder: Path, deadline: float) -> list[Result]:
    """Measure one system after the other; print each result as it comes."""
    results: list[Result] = []
    queue = list(requests(arguments, folder))
    waiting = Waiting.start(queue[0], arguments.out) if queue else None
    save_models(folder, sorted({request.model for request in queue}), arguments.device)
    for number, request in enumerate(queue):
        assert waiting is not None
        process = waiting
        # The next one imports its packages meanwhile.
        waiting = Waiting.start(queue[number + 1], arguments.out) if number + 1 < len(queue) else None
        seconds = min(_ARM_S, deadline - time.monotonic())
        for result in process.results(seconds):
            results.append(result)
            print(f"[{time.monotonic() - arguments.began:4.0f} s] {line(result, results)}", flush=True)
            if arguments.profile and result.data == request.data[0] and result.longest_kernels:
                print("\n".join(kernel_lines(result)), flush=True)
            with (arguments.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    return results


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command."""

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout of rlflow")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--models", type=names, default=["0.5B", "7B-slice", "1.5B"])
    parser.add_argument("--arms", type=names, default=ARMS)
    parser.add_argument("--data", type=names, help="D1,D2,D3; by default all for 0.5B, and one for larger models")
    parser.add_argument("--profile", action="store_true", help="print the longest kernels of each system")
    parser.add_argument("--parts", action="store_true", help="time single parts of an update as well")
    parser.add_argument("--micro-batch-tokens", type=int)
    parser.add_argument("--eager", action="store_true", help="do not compile the composite")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark on a CPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or tempfile.mkdtemp()) / "gpu_update")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    if arguments.tiny:
        arguments.models = ["tiny"]
    if unknown := [name for name in [*arguments.models, *arguments.arms] if name not in [*MODELS, *ARMS]]:
        parser.error(f"unknown: {', '.join(unknown)}")
    arguments.began = time.monotonic()
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    deadline = arguments.began + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 20 * 2**30
    with tempfile.TemporaryDirectory(dir=memory if roomy else None) as name:
        results = compare(arguments, Path(name), deadline)
    if arguments.parts:
        from benchmarks.gpu_update.processes import run_parts

        run_parts(arguments.device, arguments.out)
    Console(width=220).print(table(results))
    figures, goals = figures_and_goals(results)
    shown = {name: figures.get(name, 0.0) for name in goals}
    if arguments.tiny:
        return 0 if results and not any(result.error for result in results) else 1
    return finish("gpu_update", {**figures, **shown}, goals, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
