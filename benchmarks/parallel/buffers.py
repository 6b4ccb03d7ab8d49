"""The buffers of a weight sync, counted with the shapes of DeepSeek-V3 on 32 hosts of eight GPUs."""

import multiprocessing
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.parallel.cases import spec_of
from rlflow.engines.buckets import build_buckets
from rlflow.engines.fsdp import FsdpEngine
from rlflow.engines.sharded.mesh import create_meshes, shard_model
from rlflow.resources.layout import Layout

_RANKS = 256


def largest_buffer_mib() -> float:
    """Return the size of the largest tensor or bucket that rank 0 makes for a sync, which sends no values here."""
    # A process has one process group, and that of the fake ranks must not meet another.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure) / 2**20


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that is new."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        before = {id(tensor) for tensor in tree_leaves((args, kwargs))}
        for tensor in tree_leaves(result):
            # The shards of a DTensor are noted as such.
            if type(tensor) is torch.Tensor and id(tensor) not in before and not function.is_view:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


def _measure() -> int:
    torch.distributed.init_process_group("fake", rank=0, world_size=_RANKS, store=FakeStore())
    layout = Layout(micro_batch_tokens=1, data_parallel_size=_RANKS, expert_parallel_size=8, zero_stage=3)
    spec = replace(spec_of(Path("none"), layout, "bfloat16", num_replicas=1), world_size=_RANKS)
    # The defaults are those of DeepSeek-V3. A layer without experts and one with them stand for all others.
    config = transformers.DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        shard_model(model, create_meshes(spec), torch.bfloat16)
    engine = object.__new__(FsdpEngine)
    engine._model, engine._spec, engine._dtype = model, spec, torch.bfloat16
    with _Largest() as largest:
        buckets = list(build_buckets(engine.weights(), copy_data=False))
    sizes = (sum(2 * prod(entry.shape) for entry in bucket.entries) for bucket in buckets)
    return int(max(largest.num_bytes, *sizes))
