"""SimPO, ORPO and the variants of DPO against plain loops in float64, and against TRL's own functions."""

from collections.abc import Callable
from math import exp, log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.batch import Minibatch
from rlflow.engines.base import TokenLoss
from rlflow.engines.fake import FakeEngine
from rlflow.nodes.minibatches import Weighting
from rlflow.nodes.preference import DpoLoss
from rlflow.nodes.preference_free import OrpoLoss, SimpoLoss, SimpoUpdate
from tests.helpers import pairs, spec
from tests.unit.nodes.test_preference_dpo import summed

GIVEN = pairs(7)
OFFSETS = GIVEN.response_ids.offsets
OWN, REFERENCE = np.random.default_rng(1).normal(-2, 0.7, (2, len(GIVEN.response_ids.values))).clip(max=-0.1)
Plain = Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor]


def log_sigmoid(value: torch.Tensor) -> torch.Tensor:
    return -torch.log(1 + torch.exp(-value))


def mean(values: list[torch.Tensor]) -> torch.Tensor:
    return sum(values, torch.tensor(0.0)) / len(values)


def simpo(chosen: list[torch.Tensor], rejected: list[torch.Tensor]) -> torch.Tensor:
    return -log_sigmoid(2 * (mean(chosen) - mean(rejected)) - 0.8)


def orpo(chosen: list[torch.Tensor], rejected: list[torch.Tensor]) -> torch.Tensor:
    odds = [torch.exp(mean(logprobs)) / (1 - torch.exp(mean(logprobs))) for logprobs in (chosen, rejected)]
    return -mean(chosen) - 0.4 * log_sigmoid(torch.log(odds[0] / odds[1]))


@pytest.mark.parametrize(
    ("loss", "plain"), [(SimpoLoss(beta=2.0, margin=0.8), simpo), (OrpoLoss(ratio_coef=0.4), orpo)]
)
@pytest.mark.parametrize("limit", [4096, 40])
def test_against_a_plain_loop(loss: TokenLoss, plain: Plain, limit: int) -> None:
    compare(loss, lambda chosen, rejected, _: plain(chosen, rejected), limit)


def dpo(shape: str, is_mean: bool, nll: float) -> Callable[..., torch.Tensor]:
    def plain(chosen: list[torch.Tensor], rejected: list[torch.Tensor], apart: float) -> torch.Tensor:
        first, second = (mean(side) * (1 if is_mean else len(side)) for side in (chosen, rejected))
        margin = first - second - apart
        loss = (margin - 1 / 0.6) ** 2 if shape == "ipo" else -log_sigmoid(0.3 * margin)
        return loss - nll * mean(chosen)

    return plain


@pytest.mark.parametrize("shape", ["sigmoid", "ipo"])
@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize("nll", [0.0, 0.7])
def test_variants_of_dpo(shape: Any, is_mean: bool, nll: float) -> None:
    compare(DpoLoss(beta=0.3, shape=shape, mean_over_tokens=is_mean, nll_coef=nll), dpo(shape, is_mean, nll), 4096)


def compare(loss: TokenLoss, plain: Callable[..., torch.Tensor], limit: int) -> None:
    """Compare a loss and its gradient with those of a loop over pairs, whose third argument is the reference's part."""
    logprobs, exactly = (torch.tensor(OWN, requires_grad=True) for _ in range(2))
    ones = np.ones(14, np.bool_)
    weights = Weighting(aggregation="sequence").weights(GIVEN.response_ids.lengths, ones, GIVEN.keys[:, :2])
    columns = {"reference": GIVEN.response_ids.like(REFERENCE)}
    batch = Minibatch(**vars(GIVEN.as_sequences()), step=0, columns=columns, weights=weights)
    total, _ = summed(loss, batch, logprobs, limit)

    expected = torch.tensor(0.0, dtype=torch.float64)
    reduce = np.mean if getattr(loss, "mean_over_tokens", False) else np.sum
    for pair in range(7):
        sides = [slice(OFFSETS[row], OFFSETS[row + 1]) for row in (2 * pair, 2 * pair + 1)]
        apart = float(reduce(REFERENCE[sides[0]]) - reduce(REFERENCE[sides[1]]))
        expected = expected + plain(*(list(exactly[side]) for side in sides), apart) / 7
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    (slopes,) = torch.autograd.grad(total, logprobs)
    (exact_slopes,) = torch.autograd.grad(expected, exactly)
    assert slopes.numpy() == pytest.approx(exact_slopes.numpy(), rel=1e-5, abs=1e-8)


def test_preferred_responses_have_larger_mean_logprobs() -> None:
    """The fake engine's logprobs are minus a tenth of each token."""
    scores = SimpoUpdate().scores(FakeEngine(spec()), GIVEN)
    assert scores.tolist() == pytest.approx([-0.1 * GIVEN.response_ids[row].mean() for row in range(14)], rel=1e-6)


def test_simpo_by_hand() -> None:
    """Means of -1 and -3, times 2, less 1."""
    columns = {"rows": torch.tensor([0, 0, 1])}
    loss, metrics = SimpoLoss(beta=2.0, margin=1.0)(torch.tensor([-0.5, -1.5, -3.0]), columns)
    assert loss.tolist() == pytest.approx([log(1 + exp(-3))] * 3)
    assert metrics["margin"].tolist() == pytest.approx([4, 4, 4])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_against_trl() -> None:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    rows = torch.arange(14).repeat_interleave(torch.from_numpy(GIVEN.response_ids.lengths))
    logprobs = torch.tensor(OWN, dtype=torch.float32)
    means = torch.stack([side.mean() for side in torch.split(logprobs, GIVEN.response_ids.lengths.tolist())])
    first = torch.from_numpy(OFFSETS[:-1:2])
    trainer: Any = SimpleNamespace(
        alpha=0.0,
        beta=2.0,
        simpo_gamma=0.8,
        label_smoothing=0.0,
        loss_type="simpo",
        accelerator=SimpleNamespace(device="cpu"),
    )
    theirs, _, _ = CPOTrainer.cpo_loss(trainer, means[0::2], means[1::2])
    ours, _ = SimpoLoss(beta=2.0, margin=0.8)(logprobs, {"rows": rows})
    assert ours[first].numpy() == pytest.approx(theirs.numpy(), rel=1e-5)

    # TRL subtracts this from the loss of the chosen response.
    trainer.beta = 0.4
    bonus = ORPOTrainer.odds_ratio_loss(trainer, means[0::2], means[1::2])[0]
    ours, _ = OrpoLoss(ratio_coef=0.4)(logprobs, {"rows": rows})
    assert ours[first].numpy() == pytest.approx((-means[0::2] - bonus).numpy(), rel=1e-5)
