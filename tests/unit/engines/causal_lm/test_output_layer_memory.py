"""Peaks of allocated memory: logits never exist together, and a batch may be of any size."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rlflow.engines.causal_lm import output_layer as head
from rlflow.engines.causal_lm.output_layer import score_targets
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.policy_loss import LikelihoodLoss
from tests.helpers import minibatch, sequences, spec


def peak(work: Callable[[], object]) -> int:
    """Return the peak of torch's allocator in bytes, above its bytes at the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.max() - held[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_never_exist_together(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    tokens, width, vocabulary = 512, 16, 8192
    monkeypatch.setattr(head, "CPU_LOGITS_AT_ONCE", 2**17)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    logits = tokens * vocabulary * 4

    def differentiate() -> None:
        torch.autograd.backward(score_targets(hidden, weight, None, targets, 1.0, "reported").sum())

    assert peak(differentiate) < logits / 5


@pytest.mark.parametrize("tokens", [1, 64, pytest.param(1024, marks=pytest.mark.slow)])
def test_few_tokens_need_no_copy_of_the_output_layer(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    width, vocabulary = 256, 8192
    monkeypatch.setattr(head, "CPU_LOGITS_AT_ONCE", 2**16)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    own = (vocabulary + 4 * tokens) * width * 4  # gradients; of the hidden states as they are summed up too

    def differentiate() -> None:
        torch.autograd.grad(score_targets(hidden, weight, None, targets, 1.0, "reported")[:, 0].sum(), [hidden, weight])

    assert peak(differentiate) < own + 6 * 2**16 * 4


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[32], [4] * 8], ids=["group_size", "prompts"])
def test_the_peak_does_not_grow_with_the_batch(groups: list[int]) -> None:
    engine = TorchEngine(spec(capabilities=["Trains"], micro_batch_tokens=64))
    small, large = (minibatch(sequences([16] * len(sizes), [[16] * size for size in sizes])) for sizes in ([4], groups))
    for _ in range(2):
        engine.update(small, LikelihoodLoss())
    updates = [peak(partial(engine.update, batch, LikelihoodLoss())) for batch in (small, large)]
    scores = [peak(partial(engine.logprobs, batch, 1.0)) for batch in (small, large)]
    # A number per token has 4 bytes of the thousands that a token takes.
    assert updates[1] <= 1.05 * updates[0]
    assert scores[1] <= 1.05 * scores[0]
