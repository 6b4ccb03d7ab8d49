"""The cases of the comparison: five tiny models, all layouts on 2 and 4 ranks, and the rows of each rank."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from rlflow.batch import Minibatch, Packed
from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.recipe import Model, Optimizer
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture

VOCABULARY, PROMPTS, GROUP, STEPS = 128, 4, 2, 3
CHARACTERS = "".join(chr(0x100 + number) for number in range(VOCABULARY - 1))
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1},
}
SPARSE = SIZES | {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "tie_word_embeddings": False}
LATENT = SPARSE | {
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 16, "routed_scaling_factor": 2.5},
}
MODELS = {
    "dense": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "tied": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SPARSE, head_dim=16, num_experts=8, norm_topk_prob=True),
    "mixtral": transformers.MixtralConfig(**SPARSE, num_local_experts=8),
    "deepseek_v3": transformers.DeepseekV3Config(**LATENT),
}


class Loss:
    """Advantages times logprobs, with a little entropy."""

    temperature, entropy = 1.0, "trained"

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -(columns["advantages"] * logprobs + 0.01 * columns["entropy"]), {}


def minibatch(step: int, seed: int = 0) -> Minibatch:
    """Return two responses of different lengths to each of four prompts."""
    draw = np.random.default_rng(seed * STEPS + step)
    prompts = [draw.integers(1, VOCABULARY, draw.integers(3, 10)) for _ in range(PROMPTS)]
    rows = [draw.integers(1, VOCABULARY, draw.integers(3, 14)) for _ in range(PROMPTS * GROUP)]
    responses = Packed.from_rows(rows, np.int32)
    count = len(responses.values)
    return Minibatch(
        keys=np.array([[step, prompt, sample] for prompt in range(PROMPTS) for sample in range(GROUP)], np.int64),
        prompt_ids=Packed.from_rows([prompt for prompt in prompts for _ in range(GROUP)], np.int32),
        response_ids=responses,
        step=step,
        columns={"advantages": responses.like(draw.standard_normal(count).astype(np.float32))},
        weights=responses.like(np.full(count, 1 / count, np.float32)),
    )


def spec_of(model: Path, layout: Layout, dtype: str = "float32", **of_engine: Any) -> EngineSpec:
    """Return what an engine is built from; ``of_engine`` is what its layout has in addition."""
    return EngineSpec(
        role="actor",
        model_name="policy",
        model=Model(path=str(model), dtype=dtype),  # type: ignore[arg-type]
        capabilities=frozenset({"Trains", "Scores"}),
        device="cpu",
        seed=0,
        steps=STEPS,
        optimizer=Optimizer(learning_rate=1e-4),
        layout=replace(layout, **of_engine),
    )


def layouts(model: str) -> Iterator[Layout]:
    """Yield all combinations of degrees on 2 and 4 ranks.

    Tensor-parallel ranks share the heads of keys evenly, and groups of experts consist of them.
    """
    sizes, sparse = (1, 2, 4), model not in ("dense", "tied")
    key_heads = MODELS[model].num_key_value_heads
    degrees = product((2, 4), sizes, sizes, sizes, sizes if sparse else (1,))
    for ranks, replicas, sequence, tensor, experts in degrees:
        data, is_sharing = (
            ranks // (sequence * tensor),
            key_heads % tensor == 0 and (not sparse or experts % tensor == 0),
        )
        if data and is_sharing and data % replicas == 0 and (ranks // replicas) % experts == 0:
            yield Layout(
                micro_batch_tokens=48,
                data_parallel_size=data,
                sequence_parallel_size=sequence,
                tensor_parallel_size=tensor,
                expert_parallel_size=experts,
                num_replicas=replicas,
                zero_stage=3,
                reduces_once=(replicas + sequence + experts) % 2 == 0 or tensor == 4,
                gradient_checkpointing=(ranks + experts) % 4 != 0,
            )


def shares(batch: Minibatch, layout: Layout) -> list[Minibatch]:
    """Return the rows of each rank: not the same number on all."""
    data = layout.data_parallel_size
    ends = {1: [8], 2: [5, 8], 4: [1, 4, 6, 8]}[data]
    parts = [batch.take(np.arange(start, end)) for start, end in pairwise([0, *ends])]
    return [part for part in parts for _ in range(layout.ranks_per_share)]


def make_models(folder: Path) -> None:
    """Write the models."""
    for name, config in MODELS.items():
        save_model(folder / name, config)


def save_model(folder: Path, config: Any) -> None:
    """Write a model with random weights, and a tokenizer of characters."""
    sizes = {name: size for name, size in SIZES.items() if name != "initializer_range"}
    architecture = Architecture(model_type="qwen3", head_dim=16, **sizes)  # type: ignore[arg-type]
    characters = Model(random_weights=True, characters=CHARACTERS, architecture=architecture)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    new_tokenizer(characters).save_pretrained(folder)
