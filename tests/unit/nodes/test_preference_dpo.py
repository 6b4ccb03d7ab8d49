"""DPO by hand, on ragged random numbers against a plain loop in float64, and whatever way its pairs are cut."""

from math import exp, log

import numpy as np
import pytest
import torch

from rlflow.batch import Logprobs, Minibatch
from rlflow.batch.packed import Packed
from rlflow.data.source import make_pairs
from rlflow.engines.base import TokenLoss
from rlflow.engines.causal_lm.micro_batches import build_micro_batches
from rlflow.engines.causal_lm.totals import LossTotals
from rlflow.engines.fake import FakeEngine
from rlflow.nodes.minibatches import Weighting
from rlflow.nodes.preference import DpoLoss, DpoUpdate
from tests.helpers import keys, minibatch, pairs, spec


def test_by_hand() -> None:
    """A pair of two tokens and one: d is 0.5 + 0.5 of the chosen response, -1 of the rejected one."""
    logprobs = torch.tensor([-1.0, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    columns = {"reference": torch.tensor([-1.5, -1.5, -2.0]), "rows": torch.tensor([0, 0, 1])}
    loss, metrics = DpoLoss(beta=0.5)(logprobs, columns)
    assert loss.tolist() == pytest.approx([log(1 + exp(-1))] * 3)
    assert metrics["margin"].tolist() == pytest.approx([1, 1, 1])
    assert metrics["accuracy"].tolist() == [1, 1, 1]
    (slopes,) = torch.autograd.grad(loss[0], logprobs)
    steep = 0.5 / (1 + exp(1))
    assert slopes.tolist() == pytest.approx([-steep, -steep, steep])


def test_a_tie_is_half_right() -> None:
    columns = {"reference": torch.tensor([-1.0, -1.0]), "rows": torch.tensor([0, 1])}
    assert DpoLoss(beta=1.0)(torch.tensor([-2.0, -2.0]), columns)[1]["accuracy"].tolist() == [0.5, 0.5]


def summed(loss: TokenLoss, given: Minibatch, outputs: torch.Tensor, limit: int) -> tuple[torch.Tensor, LossTotals]:
    """Return the loss over passes of at most so many tokens."""
    totals, total = LossTotals(loss, torch.device("cpu"), "actor"), outputs.new_zeros(())
    places = given.response_ids.like(np.arange(len(given.response_ids.values)))
    for rows in build_micro_batches(given, limit):
        total = total + totals.add(given.take(rows), outputs[torch.from_numpy(places.take(rows).values)], {})
    return total, totals


@pytest.mark.parametrize("limit", [4096, 40, 1])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_against_a_plain_loop(limit: int, label_smoothing: float) -> None:
    given, beta, draw = pairs(7), 0.3, np.random.default_rng(1)
    size, offsets = len(given.response_ids.values), given.response_ids.offsets
    own, reference = draw.normal(-2, 1, (2, size))
    logprobs = torch.tensor(own, requires_grad=True)
    column = given.response_ids.like(reference)
    batch = Minibatch(
        **vars(given.as_sequences()),
        step=0,
        columns={"reference": column},
        weights=Weighting(aggregation="sequence").weights(
            given.response_ids.lengths, np.ones(14, np.bool_), given.keys[:, :2]
        ),
    )
    total, totals = summed(DpoLoss(beta=beta, label_smoothing=label_smoothing), batch, logprobs, limit)
    (slopes,) = torch.autograd.grad(total, logprobs)

    loss, right, expected = 0.0, 0, np.zeros(size)
    for pair in range(7):
        chosen, rejected = (slice(offsets[row], offsets[row + 1]) for row in (2 * pair, 2 * pair + 1))
        margin = beta * (sum(own[chosen] - reference[chosen]) - sum(own[rejected] - reference[rejected]))
        loss += (1 - label_smoothing) * log(1 + exp(-margin)) + label_smoothing * log(1 + exp(margin))
        right += margin > 0
        slope = beta * (1 / (1 + exp(-margin)) - 1 + label_smoothing)
        expected[chosen] += slope / 7
        expected[rejected] -= slope / 7
    assert float(total.detach()) == pytest.approx(loss / 7, rel=1e-6)
    assert slopes.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-8)
    assert totals.sums["accuracy"] == pytest.approx(right / 7, rel=1e-6)


def test_pairs_stay_whole_in_minibatches() -> None:
    """Five pairs into two minibatches are three and two; what the loss is told to read comes along."""
    given, seen = pairs(5), []

    class Recorder(FakeEngine):
        def update(self, minibatch: Minibatch, loss: TokenLoss):  # type: ignore[no-untyped-def]
            seen.append(minibatch)
            return super().update(minibatch, loss)

    reference = Logprobs(values=given.response_ids.like(np.zeros(len(given.response_ids.values), np.float32)))
    metrics = DpoUpdate(num_minibatches=2).run(Recorder(spec()), given, reference).values
    assert [part.keys[:, 1:].tolist() for part in seen] == [
        [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]],
        [[3, 0], [3, 1], [4, 0], [4, 1]],
    ]
    assert all(part.unit_size == 2 for part in seen)
    assert {"accuracy", "margin", "loss"} <= metrics.keys()


def test_accuracy_of_held_out_pairs() -> None:
    """The fake engine's logprobs are minus a tenth of each token."""
    rows = [[1], [2], [5]], [[2], [1], [5]]
    chosen, rejected = (Packed.from_rows(ids, np.int32) for ids in rows)
    given = make_pairs(keys(3), Packed.from_rows([[1]] * 3, np.int32), chosen, rejected)
    nothing = Logprobs(values=minibatch(given, reference=np.zeros(6)).columns["reference"])
    assert DpoUpdate().accuracy(FakeEngine(spec()), given, reference=nothing) == pytest.approx(0.5)
    against = Logprobs(values=given.response_ids.like(np.array([-1, 0, -1, 0, -1, 0], np.float32)))
    assert DpoUpdate().accuracy(FakeEngine(spec()), given, reference=against) == 1.0
