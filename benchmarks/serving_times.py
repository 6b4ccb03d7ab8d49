"""Compare the times of decoding and of reading prompts with measured kernels of vLLM.

``python -m benchmarks.serving_times [--json FILE] [--tables FOLDER]``

The referee is aiconfigurator-core (Apache-2.0, https://pypi.org/project/aiconfigurator-core), whose tables hold the
times of vLLM's matrix products, attention, experts and all-reduces on each kind of GPU. It adds up the kernels of a
step, so that the host's work of a step is left out of the planner's predictions, too. ``FOLDER`` has the package
unpacked; by default pip installs it into a folder of its own.
"""

import argparse
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import Goal, finish
from rlflow.resources.cluster import Gpu
from rlflow.resources.layout import GIB
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.decoder import Decoder, decoder_of
from rlflow.resources.time.speed import Efficiency, Speed, gpu_speed
from rlflow.schema import parse

_PACKAGE = "aiconfigurator-core==0.12.0"
_FOLDER = Path(sys.prefix) / "benchmark_peers" / "aiconfigurator"
_CONF = Path(__file__).parents[1] / "conf"
# Cards of conf, with the names of their tables and vLLM's versions.
_GPUS = {
    "a100_80gb": ("a100_sxm", "0.14.0"),
    "h100_80gb": ("h100_sxm", "0.24.0"),
    "h200": ("h200_sxm", "0.24.0"),
    "b200": ("b200_sxm", "0.24.0"),
}
# Cards of conf, with the sizes of the tensor-parallel groups.
_MODELS = {
    "qwen3_1_7b": ("Qwen/Qwen3-1.7B", (1,)),
    "qwen3_8b": ("Qwen/Qwen3-8B", (1, 2)),
    "llama3_1_8b": ("meta-llama/Meta-Llama-3.1-8B", (1,)),
    "qwen3_32b": ("Qwen/Qwen3-32B", (2, 4)),
    "llama3_1_70b": ("meta-llama/Meta-Llama-3.1-70B", (4, 8)),
    "qwen3_30b_a3b": ("Qwen/Qwen3-30B-A3B", (1, 2)),
}
_BATCHES, _CONTEXTS = (1, 8, 32, 128, 256), (512, 2048, 8192)
_PROMPTS = ((1, 512), (1, 2048), (1, 8192), (4, 2048), (16, 512))
# The share of a GPU that an engine has for weights and the KV cache.
_SHARE = 0.85


@dataclass(frozen=True)
class Measured:
    """A step of a model on a kind of GPU."""

    gpu: str
    model: str
    is_decoding: bool
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return the relative error with its sign."""
        return self.predicted / self.measured - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tables", type=Path, help="folder of an unpacked aiconfigurator-core")
    arguments = parser.parse_args()
    referee = _referee(arguments.tables or _installed())
    steps = [step for gpu in _GPUS for model in _MODELS for step in _steps(referee, gpu, model)]
    _write(steps)
    decoding, prompts = ([abs(s.error) for s in steps if s.is_decoding is kind] for kind in (True, False))
    figures = {
        "decode_error_median": median(decoding),
        "decode_error_max": max(decoding),
        "prefill_error_median": median(prompts),
    }
    most = dict(zip(figures, (0.1, 0.3, 0.1), strict=True))
    goals = {name: Goal(f"at most {most[name]}", value <= most[name]) for name, value in figures.items()}
    return finish("serving_times", figures, goals, arguments.json)


def _installed() -> Path:
    if not _FOLDER.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(_FOLDER), _PACKAGE]
        subprocess.run(command, check=True, timeout=600)
    return _FOLDER


def _referee(folder: Path) -> Any:
    sys.path.append(str(folder))
    logging.disable(logging.WARNING)
    return import_module("aiconfigurator_core.sdk.engine").EngineHandle


def _steps(referee: Any, gpu: str, model: str) -> Iterator[Measured]:
    """Yield the steps of a model that fit into the memory of a kind of GPU."""
    system, version = _GPUS[gpu]
    name, widths = _MODELS[model]
    card = parse(Gpu, _card("gpu", gpu), gpu)
    architecture = parse(Architecture, _card("model", model)["architecture"], model)
    kernels = Efficiency(decode_step_s=0.0, decode_sequence_s=0.0)
    speed = gpu_speed(card, 8, kernels)
    for width in widths:
        experts = {"moe_tp_size": width} if architecture.num_experts else {}
        engine = referee.compile(name, system, "vllm", backend_version=version, tp_size=width, **experts)
        decoder = decoder_of(architecture, width, 1, speed, 2)
        for batch in _BATCHES:
            for context in _CONTEXTS:
                if _fits(architecture, width, card, batch * context):
                    seconds = 1e-3 * engine.predict_decode_latency(batch, context)
                    yield Measured(gpu, model, True, decoder.seconds(batch, context), seconds)
        yield from _prompts(engine, decoder, speed, gpu, model)


def _prompts(engine: Any, decoder: Decoder, speed: Speed, gpu: str, model: str) -> Iterator[Measured]:
    for batch, length in _PROMPTS:
        seconds = 1e-3 * engine.predict_prefill_latency(batch, length)
        yield Measured(gpu, model, False, decoder.prefill(speed, batch * length, length), seconds)


def _fits(model: Architecture, width: int, gpu: Gpu, tokens: int) -> bool:
    cached = 2 * model.kv_values_per_token * tokens / min(width, model.num_key_value_heads)
    return 2 * model.num_parameters / width + cached < _SHARE * (gpu.memory_gib or 0.0) * GIB


def _card(kind: str, name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(_CONF / kind / f"{name}.yaml"))


def _write(steps: list[Measured]) -> None:
    """Print the errors of each model on each kind of GPU: the median with its sign, and the largest."""
    table = Table("GPU", "model", "decoding", "median", "largest", "prompts", "median", "largest")
    for gpu in _GPUS:
        for model in _MODELS:
            cells = []
            for is_decoding in (True, False):
                key = (gpu, model, is_decoding)
                errors = [step.error for step in steps if (step.gpu, step.model, step.is_decoding) == key]
                cells += [str(len(errors)), f"{median(errors):+.0%}", f"{max(errors, key=abs):+.0%}"]
            table.add_row(gpu, model, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
