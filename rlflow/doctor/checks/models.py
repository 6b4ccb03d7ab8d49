"""The model and the batch that checks of engines use: the figures of Qwen2.5-0.5B with random weights."""

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlflow.batch import Minibatch, Packed, Prompts
from rlflow.engines.base import EngineSpec
from rlflow.recipe import Model, Optimizer
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture

if TYPE_CHECKING:
    from torch import Tensor

_CHARACTERS = "0123456789+="
# Qwen/Qwen2.5-0.5B, from its config.json on the hub.
HALF_BILLION = Architecture(
    model_type="qwen2",
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=151_936,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
    rope_theta=1_000_000.0,
)


def spec_of(
    architecture: Architecture, layout: Layout, *capabilities: str, device: str, max_model_len: int | None = None
) -> EngineSpec:
    """Return what an engine of one worker is built from: random weights in bfloat16, without a warm-up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return EngineSpec(
        role="actor",
        model_name="policy",
        model=Model(random_weights=True, characters=_CHARACTERS, architecture=architecture, dtype="bfloat16"),
        capabilities=frozenset(capabilities),
        device=device,
        seed=0,
        steps=10,
        optimizer=Optimizer(learning_rate=1e-4),
        layout=layout,
        address=f"127.0.0.1:{port}",
        max_model_len=max_model_len,
    )


def prompts_of(count: int, tokens: int) -> Prompts:
    """Return random prompts of equal length."""
    draw = np.random.default_rng(0)
    return Prompts(
        keys=np.array([[0, prompt, 0] for prompt in range(count)], np.int64),
        ids=Packed.from_rows([draw.integers(1, len(_CHARACTERS), tokens) for _ in range(count)], np.int32),
        rows=({},) * count,
    )


def minibatch_of(rows: int, prompt_tokens: int, response_tokens: int) -> Minibatch:
    """Return random rows of equal length, every response token with the same weight."""
    draw = np.random.default_rng(1)
    prompts = prompts_of(rows, prompt_tokens)
    response_ids = Packed.from_rows(
        [draw.integers(1, len(_CHARACTERS), response_tokens) for _ in range(rows)], np.int32
    )
    count = rows * response_tokens
    return Minibatch(
        keys=prompts.keys,
        prompt_ids=prompts.ids,
        response_ids=response_ids,
        step=0,
        columns={},
        weights=response_ids.like(np.full(count, 1 / count, np.float32)),
    )


class NegativeLogprob:
    """The loss of supervised fine-tuning."""

    temperature = 1.0

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]", /) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss [T] and no metrics."""
        return -logprobs, {}
