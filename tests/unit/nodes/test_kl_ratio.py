"""Ratios, KL estimates and clipping far from 1: bounded, and equal to what papers and other libraries say."""

from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlflow.batch import Logprobs
from rlflow.engines.causal_lm.totals import LossTotals, weighted_means
from rlflow.nodes.kl import ratio, token_kl
from rlflow.nodes.policy_loss import Correction
from rlflow.nodes.policy_update import PolicyGradient, PolicyUpdate
from rlflow.nodes.policy_variants import CispoUpdate, GspoUpdate
from tests.helpers import minibatch, rollouts, sequences

UPDATES = [PolicyUpdate(), GspoUpdate(), CispoUpdate()]


def loss_of(node: PolicyGradient, log_ratios: list[float], advantages: list[float], **more: list[float]) -> Any:
    """Return the loss of tokens that are a response each, its gradient, and the metrics."""
    logprobs = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    columns: dict[str, Tensor] = {
        "old_logprobs": torch.zeros(len(log_ratios), dtype=torch.float64),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "rows": torch.arange(len(log_ratios)),
        **{name: torch.tensor(values, dtype=torch.float64) for name, values in more.items()},
    }
    loss, metrics = node.loss(1.0)(logprobs, columns)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.detach().tolist(), gradient.tolist(), metrics


@pytest.mark.parametrize("node", UPDATES, ids=lambda node: node.kind)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [21.0, 89.0, 800.0, -21.0, -800.0])
def test_far_log_ratios_have_a_finite_loss_and_no_gradient_of_the_ratio(
    node: PolicyGradient, advantage: float, log_ratio: float
) -> None:
    (loss,), (gradient,), metrics = loss_of(node, [log_ratio], [advantage])
    assert abs(loss) <= exp(20) * max(1, abs(log_ratio))
    # CISPO's gradient is that of the logprob times a bounded ratio.
    assert abs(gradient) <= (5 if isinstance(node, CispoUpdate) else 0)
    assert all(np.isfinite(value.detach().nan_to_num().numpy()).all() for value in metrics.values())


def test_ratios_are_exact_as_far_as_twenty() -> None:
    given = torch.tensor([-20.0, -3, 0, 5, 20], dtype=torch.float64)
    assert ratio(given).tolist() == [exp(value) for value in given.tolist()]


def test_k3_of_a_token_is_at_most_ten() -> None:
    """The limit holds in a loss and in rewards."""
    node = PolicyUpdate(kl_coef=1.0)
    _, gradient, metrics = loss_of(node, [0.0] * 4, [0.0] * 4, reference=[1.0, 3.0, 30.0, 500.0])
    assert metrics["kl"].tolist() == pytest.approx([exp(1) - 2, 10, 10, 10])
    assert gradient == pytest.approx([1 - exp(1), 0, 0, 0])
    written = rollouts(sequences([1], [[4]]))
    reference = Logprobs(values=written.logprobs.like(np.array([1.0, 3.0, 30.0, 500.0], np.float32)))
    kl = token_kl("k3", written, reference, None)
    assert kl.values == pytest.approx([exp(1) - 2, 10, 10, 10])


@pytest.mark.parametrize("node", [PolicyUpdate(dual_clip=3.0), GspoUpdate(dual_clip=3.0)], ids=lambda node: node.kind)
def test_dual_clip_bounds_bad_tokens_alone(node: PolicyGradient) -> None:
    """Ratios 2, 4 and 4: -max(min(w A, clip(w) A), 3 A) where A < 0 (arXiv 1912.09729, equation 5)."""
    log_ratios = [float(np.log(2)), float(np.log(4)), float(np.log(4))]
    loss, gradient, metrics = loss_of(node, log_ratios, [-0.5, -0.5, 0.5])
    high = 1 + (0.2 if isinstance(node, PolicyUpdate) else 4e-4)
    assert loss == pytest.approx([1.0, 1.5, -0.5 * high])
    assert gradient == pytest.approx([1.0, 0, 0])
    assert metrics["clip_fraction"].tolist() == [0, 1, 1]


def test_the_fraction_that_is_clipped_by_the_sign_of_the_advantage() -> None:
    """Two of three tokens with a negative advantage are clipped, one of two with a positive one, and no others."""
    given = sequences([1], [[6]])
    ratios = np.array([0.5, 0.5, 1.0, 1.5, 1.0, 9.0])
    batch = minibatch(
        given, old_logprobs=np.zeros(6), advantages=np.array([-1.0, -2, -1, 1, 1, 0]), logprobs=np.log(ratios)
    )
    totals = LossTotals(PolicyUpdate().loss(1.0), torch.device("cpu"), "actor")
    totals.add(batch, torch.from_numpy(batch.columns["logprobs"].values), {})
    said = weighted_means(totals.sums)
    assert said["clip_fraction"] == pytest.approx(3 / 6)
    assert said["clip_fraction_negative"] == pytest.approx(2 / 3)
    assert said["clip_fraction_positive"] == pytest.approx(1 / 2)


def test_without_a_bad_token_none_of_them_is_clipped() -> None:
    batch = minibatch(sequences([1], [[2]]), old_logprobs=np.zeros(2), advantages=np.ones(2), logprobs=np.ones(2))
    totals = LossTotals(PolicyUpdate().loss(1.0), torch.device("cpu"), "actor")
    totals.add(batch, torch.from_numpy(batch.columns["logprobs"].values), {})
    assert weighted_means(totals.sums)["clip_fraction_negative"] == 0


def test_cispo_with_a_lower_bound() -> None:
    log_ratios = [float(np.log(value)) for value in (0.5, 0.9, 9.0)]
    _, gradient, metrics = loss_of(CispoUpdate(clip_eps=0.2, clip_eps_high=4.0), log_ratios, [1.0, 1.0, 1.0])
    assert gradient == pytest.approx([-0.8, -0.9, -5.0])
    assert metrics["clip_fraction"].tolist() == [1, 0, 1]


def test_a_correction_by_the_geometric_mean() -> None:
    """The ratios 4 and 1 of the first response have the geometric mean 2; the second response has 1/8."""
    weights, _ = Correction(level="geometric", outside="mask", max_ratio=1.9)(
        torch.tensor([4, 1, 0.125]).log(), torch.tensor([0, 0, 1])
    )
    assert weights.tolist() == pytest.approx([0, 0, 0.125])


def test_a_far_correction_is_its_bound() -> None:
    weights, metrics = Correction(level="sequence")(torch.full((9,), 15.0), torch.zeros(9, dtype=torch.int64))
    assert weights.tolist() == [2.0] * 9
    assert metrics["corrected_fraction"].tolist() == [1.0] * 9
