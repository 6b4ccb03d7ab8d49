"""Mixtures of experts and others that two ranks load under ZeRO 3: the same weights, and never many at once."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlflow.engines.base import EngineSpec
from rlflow.engines.sharded.loading import load_sharded
from rlflow.recipe import Model
from rlflow.resources.layout import Layout
from tests.helpers import spec
from tests.integration.engine_process import EngineProcess, all_of, free_address, processes

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow

LAYERS = 12
FIGURES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3": {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def two() -> "Iterator[Sequence[EngineProcess]]":
    with processes(2) as started:
        yield started


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors that were there at once, of those that operations have made in here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = storage.nbytes()
            weakref.finalize(storage, self._bytes.pop, key, None)
            self.most = max(self.most, sum(self._bytes.values()))


def load(engines: list[Any], of: EngineSpec) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the most bytes at once while a model was loaded, and its weights whole. Runs in the child."""
    import deepspeed

    from rlflow.engines.sharded.settings import deepspeed_config, init_deepspeed

    init_deepspeed(of)
    config = deepspeed_config(of, trains=False)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    with Live() as live:
        model = load_sharded(of, config)
    whole = {}
    for name, weight in model.named_parameters():
        with deepspeed.zero.GatheredParameters([weight]):
            whole[name] = weight.detach().clone()
    return live.most, whole


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS if kind != "qwen3_moe")]
)
def test_every_rank_holds_its_share_and_a_layer(two: Sequence[EngineProcess], kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **FIGURES, **KINDS[kind])
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(tmp_path, max_shard_size="200KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    of = replace(
        spec("reference", model=Model(path=str(tmp_path)), capabilities=["Scores"]),
        layout=Layout(micro_batch_tokens=64, zero_stage=3, data_parallel_size=2),
    )
    address = free_address()
    loaded = all_of(two, load, [replace(of, rank=rank, world_size=2, address=address) for rank in range(2)])
    total = sum(weight.nbytes for weight in expected.parameters())
    layer = sum(weight.nbytes for weight in expected.get_submodule("model.layers.0").parameters())
    for rank, (most, weights) in enumerate(loaded):
        assert weights.keys() == dict(expected.named_parameters()).keys()
        for name, weight in expected.named_parameters():
            assert torch.equal(weight, weights[name]), name
        # Rank 0 has a layer's experts one by one, put together, and in the model.
        assert most < total / 2 + (3 if rank == 0 else 2) * layer
