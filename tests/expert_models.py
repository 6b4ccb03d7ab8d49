"""Tiny mixture-of-experts models with random weights, and routing for them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Packed, Sequences
from rlflow.batch.routing import to_records
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.recipe import Model
from tests.helpers import MODEL

NUM_EXPERTS, NUM_CHOSEN = 8, 2
SHARED = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": NUM_CHOSEN,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
LATENT = {
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 16, "routed_scaling_factor": 2.5},
}


def config(name: str, head_dim: int = 16, vocab_size: int = 13) -> Any:
    import transformers

    shared = SHARED | {"vocab_size": vocab_size}
    if name == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**shared, head_dim=head_dim, num_experts=NUM_EXPERTS, norm_topk_prob=True)
    if name == "mixtral":
        return transformers.MixtralConfig(**shared, num_local_experts=NUM_EXPERTS)
    if name == "odd_mixtral":
        return transformers.MixtralConfig(**shared, num_local_experts=5)
    return transformers.DeepseekV3Config(**(shared | LATENT))


def save_model(folder: Path, name: str, head_dim: int = 16, tokens: Model = MODEL) -> Model:
    """Write a model to a folder, with the vocabulary of ``tokens``.

    vLLM on CPUs has no kernels for the small ``head_dim``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    assert tokens.architecture is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config(name, head_dim, tokens.architecture.vocab_size)).save_pretrained(folder)
    new_tokenizer(tokens).save_pretrained(folder)
    return Model(path=str(folder), dtype="float32")


def models_in(folders: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Return a function that makes each of the models once, with random weights in a folder."""
    return cache(lambda name: save_model(folders.mktemp(name), name))


def random_routing(of: Sequences, num_layers: int, seed: int = 0) -> Packed:
    """Return other experts than a router would choose, the same for the same prompt."""
    draws = (np.random.default_rng((seed, row, prompt)) for row, (_, prompt, _) in enumerate(of.keys))
    rows = []
    for row, draw in enumerate(draws):
        prompt, response = len(of.prompt_ids[row]), len(of.response_ids[row])
        of_prompt = np.random.default_rng((seed, int(of.keys[row, 1])))
        experts = [_choose(of_prompt, num_layers) for _ in range(prompt)]
        experts += [_choose(draw, num_layers) for _ in range(response - 1)]
        rows.append(to_records(np.stack(experts), NUM_EXPERTS))
    return Packed.from_rows(rows, rows[0].dtype)


def _choose(draw: np.random.Generator, num_layers: int) -> Any:
    return np.stack([draw.permutation(NUM_EXPERTS)[:NUM_CHOSEN] for _ in range(num_layers)])
