"""A small model, its batches, and free GPU memory as another process sees it, for checks of engines."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.batch import Minibatch, Packed, Prompts
from rlflow.engines.base import EngineSpec, Entropy
from rlflow.recipe import Model, Optimizer
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.system.ports import free_port

if TYPE_CHECKING:
    from torch import Tensor

ANSWER_TIMEOUT_S = 120.0
GIB = 2**30

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
    """Return the spec of an engine with one worker and random weights in bfloat16."""
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
        address=f"127.0.0.1:{free_port()}",
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
    entropy: Entropy = "unused"

    def __call__(self, logprobs: "Tensor", columns: "Mapping[str, Tensor]", /) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """Return the loss [T] and no metrics."""
        return -logprobs, {}


FreeMemory = Callable[[], float]
"""A function that returns the GiB that are free right now."""


@contextmanager
def free_memory_in_another_process(device: str) -> Iterator[FreeMemory]:
    """Yield a function that asks another process for the free memory of ``device``, in GiB.

    Memory that this process frees counts only when other processes can allocate it.
    """
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    our_end, their_end = context.Pipe()
    process = context.Process(target=_report_free_memory, args=(device, their_end), daemon=True)
    process.start()

    def free() -> float:
        our_end.send(True)
        if not our_end.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"another process did not answer within {ANSWER_TIMEOUT_S:g} s")
        return float(our_end.recv())

    # The first request creates a CUDA context there, whose memory must not count in later comparisons.
    free()
    try:
        yield free
    finally:
        our_end.send(False)
        process.join(ANSWER_TIMEOUT_S)


def _report_free_memory(device: str, requests: Any) -> None:
    import torch

    from rlflow.system import host_memory

    while requests.recv():
        on_gpu = device.startswith("cuda")
        requests.send((torch.cuda.mem_get_info(device)[0] if on_gpu else host_memory.free_bytes()) / GIB)
