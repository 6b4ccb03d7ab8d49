"""Gradients of bfloat16 weights, added up over many micro-batches and two ranks, against their sum in float64."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.batch import Minibatch
from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.engines.causal_lm.token_outputs import token_scores
from rlflow.engines.causal_lm.totals import LossTotals
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Optimizer
from rlflow.resources.layout import Layout
from tests.helpers import MODEL, minibatch, sequences, spec
from tests.integration.engine_process import EngineProcess, all_of, free_address, processes

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow

RANKS, ROWS_OF_A_RANK = 2, 32
ROW_TOKENS = 8
# So large a step that the weights it starts from do not round what is taken off them; a power of two is exact.
LEARNING_RATE = 2.0**20
BFLOAT16 = replace(MODEL, dtype="bfloat16")


@pytest.fixture(scope="module")
def two() -> "Iterator[Sequence[EngineProcess]]":
    with processes(RANKS) as started:
        yield started


@pytest.fixture(scope="module")
def address() -> str:
    return free_address()


def gradients_of_one_update(
    engines: list[Any], of: EngineSpec, share: Minibatch
) -> tuple[dict[str, torch.Tensor], list[torch.dtype]]:
    """Return what float32 masters lose in a step of plain descent, divided by its learning rate, which is the gradient;
    and the types in which gradients were summed over the ranks.

    Runs in the child.
    """
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.utils import safe_get_full_fp32_param

    from rlflow.engines.deepspeed import DeepSpeedEngine

    class Descent(DeepSpeedEngine):
        def _build_optimizer(self, weights: Any) -> Any:
            return torch.optim.SGD(weights.values(), lr=LEARNING_RATE)

    engine = Descent(of)

    def masters() -> dict[str, torch.Tensor]:
        named = engine._model.named_parameters()
        return {name: safe_get_full_fp32_param(weight).clone() for name, weight in named}

    before = masters()
    seen: list[torch.dtype] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce", "reduce_scatter_tensor"):
            patch.setattr(TorchBackend, name, recording(getattr(TorchBackend, name), seen))
        engine.update(share, LikelihoodLoss())
    return {name: (before[name] - after) / LEARNING_RATE for name, after in masters().items()}, seen


def recording(function: Any, seen: list[torch.dtype]) -> Any:
    """Return ``function`` with the types of its larger tensors written down in ``seen``."""

    def call(*arguments: Any, **named: Any) -> Any:
        tensors = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)]
        seen.extend(tensor.dtype for tensor in tensors[:1] if tensor.numel() > 64)
        return function(*arguments, **named)

    return call


def reference(batch: Minibatch) -> dict[str, torch.Tensor]:
    """Return the sum in float64 of the gradients that bfloat16 weights have for each row by itself."""
    model = load_model(spec(model=BFLOAT16), dtype=torch.bfloat16)
    sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in model.named_parameters()}
    for row in range(len(batch)):
        model.zero_grad()
        part = batch.take(np.array([row]))
        scores = token_scores(model, part, LikelihoodLoss().temperature)
        entropies = {"entropy": scores[:, 1]}
        total = LossTotals(LikelihoodLoss(), torch.device("cpu"), "actor").add(part, scores[:, 0], entropies) * RANKS
        torch.autograd.backward(total)
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            sums[name] += weight.grad.double() / RANKS
    return sums


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (1, "none"),
        (3, "none"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "weights"))
        ),
    ],
)
def test_gradients_are_added_up_in_float32(
    two: Sequence[EngineProcess], address: str, stage: int, offload: Any
) -> None:
    rows = RANKS * ROWS_OF_A_RANK
    batch = minibatch(sequences([ROW_TOKENS // 2] * rows, [[ROW_TOKENS // 2]] * rows))
    layout = Layout(micro_batch_tokens=ROW_TOKENS, zero_stage=stage, offload=offload, data_parallel_size=RANKS)
    optimizer = Optimizer(learning_rate=LEARNING_RATE, max_grad_norm=1e9)
    of = replace(spec(capabilities=["Trains", "Scores"], model=BFLOAT16, optimizer=optimizer), layout=layout)
    specs = [replace(of, rank=rank, world_size=RANKS, address=address) for rank in range(RANKS)]
    shares = [batch.take(np.arange(rank, rows, RANKS)) for rank in range(RANKS)]
    found = all_of(two, gradients_of_one_update, specs, shares)
    expected = reference(batch)
    for gradients, summed in found:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            error = float((gradient.double() - expected[name]).norm() / expected[name].norm())
            assert error < 1e-4, name
        assert set(summed) == {torch.float32}
