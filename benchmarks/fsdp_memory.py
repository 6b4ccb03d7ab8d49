"""Compare the memory model with the peak memory of FSDP2 training steps, measured without a GPU.

Torch's own tracker counts every tensor of rank 0 on fake tensors. The second of two iterations is measured, when the
optimizer has its state: forward, backward, step, gradients set to None.

Sharding: ``fully_shard`` of each decoder layer and of the root, which holds embedding, last norm and head; a layer is
resharded after its forward, the root is not; in backward the next layer is gathered ahead.
Numbers: sharded parameters, their gradients and both moments of AdamW in float32. Gathered parameters, their gradients
and activations in bfloat16, gradients reduced in float32 (``MixedPrecisionPolicy(bfloat16, float32)``).
Loss: cross-entropy of all tokens on logits upcast to float32, as transformers' ForCausalLMLoss. The model's output, and
with it the bfloat16 logits, lives until the end of backward, as in ``output = model(...); output.loss.backward()``.
Attention: flash, one causal sequence, no repeated key and value heads. The mask that transformers builds under fake
tensors (2 bytes a layer for every pair of tokens) does not exist on a GPU and is kept out.
Checkpointing: non-reentrant, of each decoder layer.

The tracker does not see the allocator's rounding and fragmentation, NCCL's buffers, the CUDA context and workspaces of
kernels. The prediction beside it leaves the terms of these names out.

``python -m benchmarks.fsdp_memory [--json FILE] [--table FILE]``; ``fsdp_memory.json`` is the committed table.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

from benchmarks.published.libraries import FSDP2
from benchmarks.reporting import Goal, finish
from rlflow.recipe.compose import CONF
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.phases import update_terms
from rlflow.resources.models.architecture import Architecture
from rlflow.schema import parse

UNSEEN = {"nccl", "context", "fragmentation"}
PHASES = ("forward", "loss", "layers", "root", "optimizer")
"""``loss`` is backward before the last layer, ``layers`` that of the layers with a tied embedding's gradient, ``root``
what is left of it."""


@dataclass(frozen=True)
class Config:
    model: str
    """A model card of the architecture qwen2 in conf/model."""
    ranks: int
    tokens: int
    """Tokens of the micro-batch, in one sequence."""
    checkpointing: bool


@dataclass(frozen=True)
class Moment:
    """The live memory at the moment of a peak."""

    kinds: Mapping[str, int]
    """Bytes by the tracker's kinds, without kinds of size zero."""
    operator: str
    """The operator after which it was measured."""

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Measured:
    phases: Mapping[str, Moment]
    """The peak of each phase."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase].bytes)

    @property
    def peak(self) -> Moment:
        return self.phases[self.peak_phase]


CONFIGS = [
    Config(model, ranks, tokens, checkpointing)
    for model, ranks, tokens in [
        ("qwen2_5_7b", 8, 4096),
        ("qwen2_5_0_5b", 1, 2048),
        ("qwen2_5_0_5b", 8, 2048),
        ("qwen2_5_0_5b", 8, 8192),
        ("qwen2_5_1_5b", 4, 4096),
        ("qwen2_5_1_5b", 8, 16384),
        ("qwen2_5_7b", 8, 16384),
        ("qwen2_5_7b", 16, 8192),
        ("qwen2_5_7b", 64, 2048),
        ("qwen2_5_32b", 16, 2048),
        ("qwen2_5_32b", 32, 4096),
        ("qwen2_5_32b", 64, 8192),
        ("qwen2_5_72b", 32, 4096),
    ]
    for checkpointing in (True, False)
]


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Run causal attention, which keeps query, key, value, output and one float32 number per head and token."""
    assert mask is None
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


# Transformers builds a mask only for names that it knows.
ATTENTION = "without_mask"
AttentionInterface.register(ATTENTION, attention)


class Tracker(FSDPMemTracker):  # type: ignore[no-untyped-call]
    """Torch's tracker, extended to record the peak of each phase."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.phases: dict[str, Moment] = {}
        self._phase, self._operator = "", ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operator = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _update_peak_stats(self, peak_state: Any) -> None:
        # The tracker calls it after each operation.
        self._phase = self._next_phase()
        live: Mapping[Any, int] = self._curr_mem_snap.get(torch.device("cpu"), {})
        kinds = {kind.value: size for kind, size in live.items() if kind != "Total" and size}
        if self._phase not in self.phases or self.phases[self._phase].bytes < sum(kinds.values()):
            self.phases[self._phase] = Moment(kinds, self._operator)

    def _next_phase(self) -> str:
        if self._in_opt:
            return "optimizer"
        if not self._mod_tracker.is_bw:
            return "forward"
        if any(".layers." in name for name in self._mod_tracker.parents):
            return "layers"
        return "root" if self._phase in ("layers", "root") else "loss"


@contextmanager
def fake_ranks(count: int) -> Iterator[DeviceMesh]:
    """Open a process group of fake ranks in which this process is rank 0."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


def written(model: str) -> dict[str, Any]:
    """Return the figures of a model card."""
    figures: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{model}.yaml").architecture)
    return dict(figures)


def build(config: Config) -> Any:
    """Build the model in float32, before sharding."""
    figures = written(config.model)
    rope = {"rope_type": "default", "rope_theta": figures.pop("rope_theta")}
    qwen = Qwen2Config(**figures, rope_parameters=rope, use_cache=False)
    model = Qwen2ForCausalLM._from_config(qwen, dtype=torch.float32, attn_implementation=ATTENTION)
    if config.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def measure(config: Config) -> Measured:
    with fake_ranks(config.ranks) as mesh, FakeTensorMode():
        model = build(config)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in [*model.model.layers, model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        # The tracker counts the other implementations several times.
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
        ids = torch.zeros(1, config.tokens, dtype=torch.int64)
        tracker = Tracker(model, optimizer)
        tracker.track_inputs((ids,))
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                tracker.phases.clear()
                output = model(input_ids=ids, labels=ids)
                output.loss.backward()
                del output
                optimizer.step()
                optimizer.zero_grad()
    return Measured(dict(tracker.phases))


def predicted_gib(config: Config) -> float:
    """Return the memory model's prediction of what the tracker sees."""
    layout = Layout(
        data_parallel_size=config.ranks,
        zero_stage=3,
        micro_batch_tokens=config.tokens,
        gradient_checkpointing=config.checkpointing,
    )
    terms = update_terms(
        parse(Architecture, written(config.model), config.model), layout, FSDP2, config.tokens, accumulates=False
    )
    return sum(gib for term, gib in terms.items() if term not in UNSEEN)


def as_json(config: Config, measured: Measured) -> str:
    """Return a measurement as one line of JSON."""
    phases = {
        phase: {"gib": round(moment.bytes / GIB, 4), "operator": moment.operator, "bytes": dict(moment.kinds)}
        for phase, moment in measured.phases.items()
    }
    peak = {"peak_gib": round(measured.peak.bytes / GIB, 4), "peak_phase": measured.peak_phase}
    return json.dumps({**asdict(config), **peak, "phases": phases})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    table = Table("model", "ranks", "tokens", "recompute", *PHASES, "peak GiB", "predicted", "s")
    lines: list[str] = []
    errors: list[float] = []
    for config in CONFIGS:
        began = time.perf_counter()
        measured = measure(config)
        table.add_row(
            config.model,
            str(config.ranks),
            str(config.tokens),
            "yes" if config.checkpointing else "no",
            *(f"{measured.phases[phase].bytes / GIB:.2f}" for phase in PHASES),
            f"{measured.peak.bytes / GIB:.2f}",
            f"{predicted_gib(config):.2f}",
            f"{time.perf_counter() - began:.0f}",
        )
        lines.append(as_json(config, measured))
        errors.append(abs(predicted_gib(config) / (measured.peak.bytes / GIB) - 1))
        if arguments.table is not None:  # after each, since all of them take minutes
            arguments.table.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    Console(width=120).print(table)
    return finish_errors("fsdp_memory", errors, 24, arguments.json)


def finish_errors(name: str, errors: Sequence[float], least: int, file: Path | None) -> int:
    """Report the relative errors of at ``least`` so many predictions; return the exit code."""
    figures = {"memory_error_max": max(errors), "configurations": len(errors)}
    goals = {
        "memory_error_max": Goal("at most 0.05", max(errors) <= 0.05),
        "configurations": Goal(f"at least {least}", len(errors) >= least),
    }
    return finish(name, figures, goals, file)


if __name__ == "__main__":
    sys.exit(main())
