from math import exp, log

import pytest
import torch

from rlflow.nodes.losses import ClippedPolicyLoss, LikelihoodLoss

LOSS = ClippedPolicyLoss(clip_eps=0.2, kl_coef=0.5, temperature=1.0)


def run(ratio: float, advantage: float, reference: float | None = None) -> tuple[float, float, dict[str, float]]:
    """Loss, its derivative by the token's logprob, and metrics, for one token whose old logprob is -1."""
    logprobs = torch.tensor([-1 + log(ratio)], dtype=torch.float64, requires_grad=True)
    columns = {"old_logprobs": torch.tensor([-1.0]), "advantages": torch.tensor([advantage])}
    if reference is not None:
        columns["reference"] = logprobs.detach() + reference
    loss, metrics = LOSS(logprobs, columns)
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    return float(loss.detach()), float(slope), {name: float(value.detach()) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 2.0, -2.4, 0.0, 1),  # clipped at 1.2
        (1.5, -2.0, 3.0, 3.0, 0),  # too likely and bad: not clipped
        (0.5, -2.0, 1.6, 0.0, 1),  # clipped at 0.8
        (0.5, 2.0, -1.0, -1.0, 0),
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float, slope: float, clipped: int) -> None:
    value, derivative, metrics = run(ratio, advantage)
    assert value == pytest.approx(loss)
    assert derivative == pytest.approx(slope)
    assert metrics["clip_fraction"] == clipped


def test_kl_is_k3() -> None:
    value, _, metrics = run(1.0, 0.0, reference=-0.3)
    assert metrics["kl"] == pytest.approx(exp(-0.3) + 0.3 - 1)
    assert value == pytest.approx(0.5 * metrics["kl"])


def test_how_far_the_sampler_was_apart() -> None:
    """Only where the ratio is not taken to what it sampled with."""
    columns = {name: torch.tensor([value]) for name, value in (("old_logprobs", -1.0), ("advantages", 0.0))}
    _, metrics = LOSS(torch.tensor([-3.0]), columns | {"sampler_logprobs": torch.tensor([-1.25])})
    assert metrics["sampler_difference"].tolist() == [0.25]
    assert "sampler_difference" not in LOSS(torch.tensor([-3.0]), columns)[1]


def test_likelihood() -> None:
    losses, _ = LikelihoodLoss()(torch.tensor([-0.5, -2.0]), {})
    assert losses.tolist() == [0.5, 2.0]
