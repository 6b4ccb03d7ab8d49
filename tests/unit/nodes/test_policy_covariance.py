"""The tokens that Clip-Cov and KL-Cov choose, by hand, and what their losses do with them."""

from typing import Any

import numpy as np
import pytest
import torch

from rlflow.batch import Logprobs, Metrics, Minibatch, RolloutAdvantages
from rlflow.batch.packed import Repeated
from rlflow.engines.base import TokenLoss
from rlflow.engines.fake import FakeEngine
from rlflow.errors import RecipeError
from rlflow.nodes.policy_covariance import ClipCovUpdate, CovarianceUpdate, KlCovUpdate
from tests.helpers import rollouts, sequences, spec

# Two prompts with two responses of two tokens each; the last response is excluded.
GIVEN = rollouts(sequences([1, 1], [[2, 2], [2, 2]]))
OLD = np.array([-1.0, -3.0, -2.0, -2.0, -5.0, -1.0, -9.0, -9.0], np.float32)
ADVANTAGES = RolloutAdvantages(values=Repeated(np.array([1, 0, -1, np.nan], np.float32), GIVEN.response_ids.lengths))
# The means over the six tokens that count are 0 and -14/6.
COVARIANCES = np.array([1, 1, 0, 0, -1, -1]) * (OLD[:6] + 14 / 6)


class Recorder(FakeEngine):
    """An engine that notes the minibatches that it trains on."""

    def __init__(self) -> None:
        super().__init__(spec())
        self.minibatches: list[Minibatch] = []

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        self.minibatches.append(minibatch)
        return super().update(minibatch, loss)


def chosen_by(node: CovarianceUpdate) -> list[float]:
    """Return which tokens of the three rollouts that are trained on are chosen."""
    engine = Recorder()
    node.run(engine, GIVEN, ADVANTAGES, old_logprobs=Logprobs(values=GIVEN.logprobs.like(OLD)))
    (minibatch,) = engine.minibatches
    return list(minibatch.columns["chosen"].values.tolist())


def test_kl_cov_takes_the_largest() -> None:
    assert np.argsort(-COVARIANCES)[:2].tolist() == [4, 0]
    assert chosen_by(KlCovUpdate(share=0.34)) == [1, 0, 0, 0, 1, 0]
    assert chosen_by(KlCovUpdate(share=1e-4)) == [0, 0, 0, 0, 1, 0]


def test_clip_cov_draws_between_its_bounds() -> None:
    """The covariances are 1.33, -0.67, 0, 0, 2.67 and -1.33: one is between 1 and 2."""
    assert chosen_by(ClipCovUpdate(share=0.9, min_covariance=1.0, max_covariance=2.0)) == [1, 0, 0, 0, 0, 0]
    both = chosen_by(ClipCovUpdate(share=0.2, min_covariance=1.0))
    assert sum(both) == 1
    assert both in ([1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0])
    assert both == chosen_by(ClipCovUpdate(share=0.2, min_covariance=1.0))
    assert sum(chosen_by(ClipCovUpdate(share=0.9, min_covariance=3.0))) == 0


def test_bounds_without_a_token_between_them_are_refused() -> None:
    with pytest.raises(RecipeError, match="max_covariance: 1 is not above min_covariance"):
        ClipCovUpdate(max_covariance=1.0).check(frozenset())


def slopes_of(node: Any) -> list[float]:
    """Return the gradient at a ratio of 1.1 for three tokens: chosen, not chosen, chosen with a negative advantage."""
    logprobs = torch.full((3,), -1 + float(np.log(1.1)), requires_grad=True)
    columns = {
        "old_logprobs": torch.full((3,), -1.0),
        "advantages": torch.tensor([2.0, 2.0, -2.0]),
        "chosen": torch.tensor([1.0, 0.0, 1.0]),
    }
    (slopes,) = torch.autograd.grad(node.surrogate(logprobs, columns)[0].sum(), logprobs)
    return list(slopes.tolist())


def test_chosen_tokens() -> None:
    assert slopes_of(ClipCovUpdate()) == pytest.approx([0, -2.2, 0])
    assert slopes_of(KlCovUpdate(penalty=0.5)) == pytest.approx([-2.2 + 0.5, -2.2, 2.2 + 0.5])
