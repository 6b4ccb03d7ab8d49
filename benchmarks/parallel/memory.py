"""Compare the memory model with the peak memory of passes of the FSDP engine's models, measured without GPUs.

``python -m benchmarks.parallel.memory [--json FILE] [--table FILE]``; ``memory.json`` is the committed table.

Torch's own tracker counts every tensor of rank 0, as in ``benchmarks.fsdp_memory``: of two iterations of a forward
pass, a backward pass and a step of AdamW, the second is measured. Ranks, tensors and collectives are fake. Models have
the widths of real ones and fewer layers; the engine's own functions shard them over replicas (HSDP), tensor-parallel
ranks and groups of ranks that divide experts, recompute layers, and score tokens in tiles of the vocabulary.

Two parts are replaced: attention keeps what a flash kernel keeps, and each expert gets the same number of tokens.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.fsdp_memory import PHASES, UNSEEN, Measured, Tracker, finish_errors, written
from benchmarks.parallel.cases import spec_of
from rlflow.engines.causal_lm import output_layer
from rlflow.engines.causal_lm.compilation import checkpoint_layers
from rlflow.engines.fsdp import ENGINE
from rlflow.engines.sharded import experts
from rlflow.engines.sharded.mesh import create_meshes, shard_model
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.phases import update_terms
from rlflow.resources.models.architecture import Architecture
from rlflow.schema import parse

# Logits of a tile: few enough to be small beside all else, and enough to be fast.
_LOGITS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Config:
    model: str
    """A model card in conf/model."""
    layers: int
    """The number of layers, one of them dense where a model has dense ones."""
    ranks: int
    tensor: int = 1
    expert: int = 1
    replicas: int = 1
    tokens: int = 4096
    """Tokens of a pass, in one sequence."""
    recomputed: bool = True

    @property
    def layout(self) -> Layout:
        return Layout(
            data_parallel_size=self.ranks // self.tensor,
            tensor_parallel_size=self.tensor,
            expert_parallel_size=self.expert,
            num_replicas=self.replicas,
            zero_stage=3,
            micro_batch_tokens=self.tokens,
            gradient_checkpointing=self.recomputed,
        )


_DENSE = [
    Config("qwen3_8b", 6, 8),
    Config("qwen3_8b", 6, 8, recomputed=False),
    Config("qwen3_8b", 6, 16, replicas=2),
    Config("qwen3_8b", 6, 8, tensor=2),
    Config("qwen3_8b", 6, 8, tensor=2, recomputed=False),
    Config("qwen3_8b", 6, 32, tensor=4, replicas=4),
    Config("qwen3_8b", 6, 16, tensor=8, replicas=2, tokens=16384),
    Config("qwen2_5_1_5b", 8, 8, replicas=2, tokens=8192),
    Config("qwen2_5_32b", 6, 32, tensor=8, tokens=8192),
    Config("qwen2_5_32b", 6, 64, tensor=4, replicas=8, tokens=8192),
    Config("qwen2_5_72b", 5, 64, tensor=8, replicas=8, tokens=16384),
    Config("qwen2_5_72b", 5, 64, tensor=2, replicas=4),
    Config("llama3_1_8b", 6, 16, tensor=2, replicas=2),
    Config("llama3_1_70b", 5, 64, tensor=8, replicas=8, tokens=8192),
    Config("llama3_1_70b", 5, 64, replicas=8),
]
_SPARSE = [
    Config(model, layers, ranks, tensor, expert, replicas, tokens, recomputed)
    for model, layers, ranks, tensor, expert, replicas, tokens, recomputed in [
        ("qwen3_30b_a3b", 5, 16, 1, 1, 1, 4096, True),
        ("qwen3_30b_a3b", 5, 16, 1, 8, 1, 4096, True),
        ("qwen3_30b_a3b", 5, 16, 1, 8, 1, 4096, False),
        ("qwen3_30b_a3b", 5, 16, 1, 8, 2, 8192, True),
        ("qwen3_30b_a3b", 5, 16, 1, 4, 1, 8192, True),
        ("qwen3_30b_a3b", 5, 16, 1, 16, 1, 16384, True),
        ("qwen3_30b_a3b", 5, 16, 2, 8, 1, 8192, True),
        ("qwen3_30b_a3b", 5, 16, 4, 8, 2, 16384, True),
        ("qwen3_30b_a3b", 5, 32, 2, 2, 4, 4096, True),
        ("qwen3_235b_a22b", 4, 64, 1, 8, 1, 4096, True),
        ("qwen3_235b_a22b", 4, 64, 1, 8, 8, 4096, True),
        ("qwen3_235b_a22b", 4, 64, 1, 8, 1, 8192, True),
        ("qwen3_235b_a22b", 4, 64, 4, 8, 1, 16384, True),
        ("qwen3_235b_a22b", 4, 64, 2, 8, 4, 8192, True),
        ("qwen3_235b_a22b", 4, 64, 4, 8, 1, 8192, False),
        ("qwen3_235b_a22b", 4, 128, 1, 16, 1, 4096, True),
        ("mixtral_8x7b", 5, 16, 1, 8, 1, 4096, True),
        ("mixtral_8x7b", 5, 16, 2, 8, 2, 8192, True),
        ("mixtral_8x7b", 5, 16, 1, 4, 2, 4096, True),
        ("mixtral_8x7b", 5, 8, 2, 2, 1, 4096, True),
        ("deepseek_v3", 3, 256, 1, 8, 1, 4096, True),
        ("deepseek_v3", 3, 256, 1, 8, 1, 2048, True),
        ("deepseek_v3", 3, 256, 1, 32, 1, 4096, True),
        ("deepseek_v3", 3, 256, 1, 8, 4, 4096, True),
        ("deepseek_v3", 3, 128, 1, 16, 2, 2048, True),
    ]
]
CONFIGS = [*_DENSE, *_SPARSE]


class _Attention(torch.autograd.Function):
    """Attention that keeps query, key, value, output and one float32 number per head and token."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value).transpose(1, 2), None  # type: ignore[no-untyped-call]


_ATTENTION = "counted"
transformers.AttentionInterface.register(_ATTENTION, _attend)


def _balanced(dispatch: Any, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
    """Return the counts of ``_Dispatch._exchange_counts`` where every expert gets the same number of tokens."""
    size, num_local = dispatch._size, dispatch._experts.num_experts
    count = chosen.numel() // size
    numbers = torch.arange(num_local, device=chosen.device).repeat(-(-count * size // num_local))
    return [count] * size, [count] * size, numbers[: count * size]


def figures_of(config: Config) -> dict[str, Any]:
    """Return the figures of the model card, with the configuration's number of layers."""
    dense = {"num_dense_layers": 1} if "num_dense_layers" in written(config.model) else {}
    return written(config.model) | {"num_hidden_layers": config.layers} | dense


def _build(config: Config) -> Any:
    """Build the model in float32, without values."""
    figures = figures_of(config)
    rope = {"rope_type": "default", "rope_theta": figures.pop("rope_theta")}
    if figures["model_type"] == "deepseek_v3":
        # The shared expert is as wide as the others, and transformers derives the width of heads.
        for name in ("shared_expert_intermediate_size", "head_dim"):
            figures.pop(name)
        figures["first_k_dense_replace"] = figures.pop("num_dense_layers")
    names = {"deepseek_v3": "n_routed_experts", "mixtral": "num_local_experts"}
    if figures["model_type"] in names:
        figures[names[figures["model_type"]]] = figures.pop("num_experts")
    of_model = transformers.AutoConfig.for_model(**figures, rope_parameters=rope, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(of_model, dtype=torch.float32, attn_implementation=_ATTENTION)
    if config.recomputed:
        checkpoint_layers(model, 0)
    return model.train()


@contextmanager
def _fake_ranks(config: Config) -> Iterator[Any]:
    """Open a process group of fake ranks, of which this process is rank 0; yield its meshes."""
    dist.init_process_group("fake", rank=0, world_size=config.ranks, store=FakeStore())
    try:
        yield create_meshes(replace(spec_of(Path("none"), config.layout, "bfloat16"), world_size=config.ranks))
    finally:
        dist.destroy_process_group()


def measure(config: Config) -> Measured:
    with _fake_ranks(config) as meshes:
        with torch.device("meta"):
            model = _build(config)
            shard_model(model, meshes, torch.bfloat16)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            mock.patch.object(output_layer, "CPU_LOGITS_AT_ONCE", _LOGITS_AT_ONCE),
            mock.patch.object(experts._Dispatch, "_exchange_counts", _balanced),
        ):
            model.to_empty(device="cpu")
            return Measured(_train(model, config))


def _train(model: Any, config: Config) -> Any:
    by_mesh: dict[Any, list[Tensor]] = {}
    for weight in model.parameters():
        by_mesh.setdefault(weight.device_mesh, []).append(weight)
    # The tracker counts the other implementations several times.
    optimizer = torch.optim.AdamW([{"params": group} for group in by_mesh.values()], foreach=False, fused=False)
    ids, places = torch.zeros(1, config.tokens, dtype=torch.int64), torch.arange(config.tokens)
    tracker = Tracker(model, optimizer)
    tracker.track_inputs((ids,))
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            tracker.phases.clear()
            with output_layer.scores_as_logits(model, places, places, 1.0, "unused") as scores:
                model(input_ids=ids, logits_to_keep=places).logits.sum().backward()
            scores.clear()
            optimizer.step()
            optimizer.zero_grad()
    return dict(tracker.phases)


def predicted_gib(config: Config) -> float:
    """Return the memory model's prediction of what the tracker sees."""
    model = parse(Architecture, figures_of(config), config.model)
    training = replace(ENGINE.training_memory["bfloat16"], logits_at_once=_LOGITS_AT_ONCE)
    terms = update_terms(model, config.layout, training, config.tokens, accumulates=False)
    return sum(gib for term, gib in terms.items() if term not in UNSEEN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", default="", help="configurations with this in their name")
    arguments = parser.parse_args()
    table = Table("configuration", *PHASES, "peak GiB", "predicted", "error")
    lines: list[str] = []
    errors: list[float] = []
    for config in CONFIGS:
        if arguments.only not in str(config):
            continue
        measured, predicted = measure(config), predicted_gib(config)
        peak = measured.peak.bytes / GIB
        errors.append(abs(predicted / peak - 1))
        phases = [f"{measured.phases[phase].bytes / GIB:.2f}" for phase in PHASES]
        table.add_row(describe(config), *phases, f"{peak:.2f}", f"{predicted:.2f}", f"{predicted / peak - 1:+.1%}")
        lines.append(json.dumps({**asdict(config), "peak_gib": round(peak, 4)}))
        if arguments.table is not None:  # after each, since all of them take minutes
            arguments.table.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    Console(width=120).print(table)
    return finish_errors("parallel.memory", errors, 40, arguments.json)


def describe(config: Config) -> str:
    """Return the differences of a configuration from one without tensor, expert parallelism and replicas."""
    degrees = {"TP": config.tensor, "EP": config.expert, "HSDP": config.replicas}
    ways = "".join(f", {name} {size}" for name, size in degrees.items() if size > 1)
    kept = "" if config.recomputed else ", kept"
    return f"{config.model}, {config.layers} layers on {config.ranks}{ways}, {config.tokens} tokens{kept}"


if __name__ == "__main__":
    sys.exit(main())
