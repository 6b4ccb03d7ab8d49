"""KTO against a plain loop in float64, and its reference point."""

import numpy as np
import pytest
import torch

import rlflow
from rlflow.batch import Divergences, Logprobs, Minibatch
from rlflow.errors import GraphError
from rlflow.nodes.minibatches import Weighting
from rlflow.nodes.preference_kto import KtoLoss, MismatchedResponses
from rlflow.nodes.reward_shaping import KlDivergence
from tests.helpers import load, pairs
from tests.unit.nodes.test_preference_dpo import summed


@pytest.mark.parametrize("limit", [4096, 40])
def test_against_a_plain_loop(limit: int) -> None:
    """300 random batches of pairs; gradients are those of the loop."""
    draw = np.random.default_rng(0)
    for seed in range(300 if limit > 40 else 20):
        given = pairs(4, seed)
        lengths, offsets = given.response_ids.lengths, given.response_ids.offsets
        own, reference = draw.normal(-2, 0.7, (2, offsets[-1])).clip(max=-0.1)
        beta, point, desirable, undesirable = draw.uniform(0.1, 2, 4)
        loss = KtoLoss(beta=beta, point=point, desirable=desirable, undesirable=undesirable)
        logprobs, exactly = (torch.tensor(own, requires_grad=True) for _ in range(2))
        weights = Weighting(aggregation="sequence").weights(lengths, np.ones(8, np.bool_), given.keys[:, :2])
        columns = {"reference": given.response_ids.like(reference)}
        batch = Minibatch(**vars(given.as_sequences()), step=0, columns=columns, weights=weights)
        total, _ = summed(loss, batch, logprobs, limit)
        expected = torch.tensor(0.0, dtype=torch.float64)
        for row in range(8):
            side = slice(offsets[row], offsets[row + 1])
            apart = exactly[side].sum() - reference[side].sum()
            value = 1 / (1 + torch.exp(-beta * (apart - point if row % 2 == 0 else point - apart)))
            expected = expected + (desirable if row % 2 == 0 else undesirable) * (1 - value) / 8
        # Weights are float32.
        assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        slopes, exact = torch.autograd.grad(total, logprobs)[0], torch.autograd.grad(expected, exactly)[0]
        assert slopes.numpy() == pytest.approx(exact.numpy(), rel=1e-5, abs=1e-8)


def test_responses_to_the_next_prompt() -> None:
    given = pairs(3)
    mismatched = MismatchedResponses().run(given)
    for row in range(6):
        assert mismatched.prompt_ids[row].tolist() == given.prompt_ids[row].tolist()
        assert mismatched.response_ids[row].tolist() == given.response_ids[(row + 2) % 6].tolist()


def test_the_divergence_of_responses_of_the_data_needs_the_policys_logprobs() -> None:
    with pytest.raises(GraphError, match=r"^graph\.kl\.old_logprobs: needs the policy's logprobs of responses"):
        rlflow.compile(load("recipe=kto_tiny", "graph.kl.old_logprobs=null", "~graph.mismatched_policy"), "local")
    given = pairs(2)
    policy, reference = (
        Logprobs(values=given.response_ids.like(np.full(given.response_ids.offsets[-1], value, np.float32)))
        for value in (-1, -3)
    )
    kl = KlDivergence().run(given, reference, policy)
    assert isinstance(kl, Divergences)
    assert kl.values.tolist() == (2 * given.response_ids.lengths).tolist()
