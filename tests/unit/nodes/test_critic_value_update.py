"""The critic's loss by hand and against a plain loop in float64, and what it is trained on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlflow.batch import Minibatch, Packed, ValueEstimates
from rlflow.engines.causal_lm.totals import LossTotals
from rlflow.nodes.critic import GaeAdvantages, ValueLoss, ValueUpdate
from rlflow.nodes.minibatches import Weighting
from rlflow.nodes.policy_update import PolicyUpdate
from tests.helpers import minibatch, rollouts, sequences
from tests.unit.nodes.test_policy_update import Recorder, columns

WHOLE = rollouts(sequences([2, 3], [[1, 2, 3], [4, 5]]))
VALUES = ValueEstimates(values=WHOLE.response_ids.like(np.arange(15, dtype=np.float32)))


def gae(excluded: tuple[int, ...] = ()) -> GaeAdvantages:
    """Return advantages whose returns are one more than the values."""
    returns = VALUES.values.like(VALUES.values.values + 1)
    gone = np.isin(np.arange(5), excluded)
    return GaeAdvantages(values=returns, returns=returns, excluded=gone, explained_variance=0.0, kl=0.0)


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [
        (1.0, 0.5, -1.0, 0),
        (1.2, 0.32, -0.8, 0),
        (1.5, 0.32, 0.0, 1),  # it went towards the return: as if it were at 1.2
        (0.5, 1.125, -1.5, 0),  # away from it
        (2.9, 0.405, 0.9, 0),  # beyond it, farther than 1.2 is before it
    ],
)
def test_clipping(value: float, loss: float, slope: float, clipped: int) -> None:
    """The value was 1, the return is 2."""
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    given = {"old_values": torch.tensor([1.0]), "returns": torch.tensor([2.0])}
    ours, metrics = ValueLoss(clip_eps=0.2)(values, given)
    (gradient,) = torch.autograd.grad(ours.sum(), values)
    assert float(ours.detach()) == pytest.approx(loss)
    assert float(gradient) == pytest.approx(slope)
    assert metrics["clip_fraction"].tolist() == [clipped]


def random_minibatch() -> Minibatch:
    given = sequences([2, 3, 1], [[4, 9, 1, 1], [2, 7, 7, 5], [6, 3, 3, 8]])
    draw = np.random.default_rng(0)
    old = draw.normal(0, 1, len(given.response_ids.values))
    near = {"values": old + draw.normal(0, 0.3, len(old)), "returns": old + draw.normal(0, 0.5, len(old))}
    weights = Weighting().weights(given.response_ids.lengths, np.ones(len(given), np.bool_), given.keys[:, :2])
    return replace(minibatch(given, 0, old_values=old, **near), weights=weights)


@pytest.mark.parametrize("clip_eps", [0.2, None])
def test_a_plain_loop_gives_the_same(clip_eps: float | None) -> None:
    batch = random_minibatch()
    given = dict(batch.columns)
    values = torch.from_numpy(given.pop("values").values).requires_grad_()
    totals = LossTotals(ValueLoss(clip_eps=clip_eps), torch.device("cpu"), "actor")
    ours = totals.add(replace(batch, columns=given), values, {})

    exactly = values.detach().double().requires_grad_()
    theirs, clipped = torch.tensor(0.0, dtype=torch.float64), 0
    for value, before, back in zip(exactly, given["old_values"].values, given["returns"].values, strict=True):
        loss = (value - float(back)) ** 2
        if clip_eps is not None:
            low, high = float(before) - clip_eps, float(before) + clip_eps
            bounded = (torch.minimum(torch.maximum(value, torch.tensor(low)), torch.tensor(high)) - float(back)) ** 2
            clipped += bool(bounded > loss)
            loss = torch.maximum(loss, bounded)
        theirs = theirs + loss / 2 / len(exactly)

    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    (mine,), (other,) = torch.autograd.grad(ours, [values]), torch.autograd.grad(theirs, [exactly])
    assert mine.double().numpy() == pytest.approx(other.numpy(), abs=1e-6)
    assert mine.abs().max() > 1e-3
    if clip_eps is not None:
        assert totals.sums["clip_fraction"] == pytest.approx(clipped / len(exactly))
        assert 0.05 < clipped / len(exactly) < 0.9, "else it would say less than it seems to"


def test_it_learns_the_returns() -> None:
    engine = Recorder()
    ValueUpdate().run(engine, WHOLE, VALUES, gae())
    ((batch, loss),) = engine.seen
    assert columns(batch) == {"old_values": list(range(15)), "returns": list(range(1, 16))}
    assert batch.weights.values == pytest.approx([1 / 15] * 15)
    assert loss == ValueLoss(clip_eps=0.2)


@pytest.mark.parametrize("excluded", [(), (1, 4)])
def test_its_minibatches_are_those_of_the_policy(excluded: tuple[int, ...]) -> None:
    policy, critic = Recorder(), Recorder()
    PolicyUpdate(num_minibatches=2, num_epochs=2).run(policy, WHOLE, gae(excluded))
    ValueUpdate(num_minibatches=2, num_epochs=2).run(critic, WHOLE, VALUES, gae(excluded))
    assert len(policy.seen) == len(critic.seen) == 4
    for (one, _), (other, _) in zip(policy.seen, critic.seen, strict=True):
        assert one.keys.tolist() == other.keys.tolist()
        assert one.weights.values.tolist() == other.weights.values.tolist()
        # Each token has its own.
        tokens = Packed(np.arange(15), WHOLE.response_ids.offsets).take(
            np.array([int(np.flatnonzero((WHOLE.keys == key).all(1))[0]) for key in other.keys])
        )
        assert columns(other)["old_values"] == tokens.values.tolist()
