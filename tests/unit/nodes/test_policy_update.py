from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import (
    Examples,
    Logprobs,
    Metrics,
    Minibatch,
    Repeated,
    RolloutAdvantages,
    Rollouts,
    TokenAdvantages,
)
from rlflow.engines.base import TokenLoss
from rlflow.engines.torch import TorchEngine
from rlflow.errors import UserError
from rlflow.nodes.policy_loss import Correction
from rlflow.nodes.policy_update import PolicyUpdate
from rlflow.nodes.policy_variants import CispoUpdate, GspoUpdate
from rlflow.nodes.sft import SftUpdate
from tests.helpers import rollouts, sequences, spec


class Recorder:
    """Keeps what it is trained on."""

    def __init__(self) -> None:
        self.seen: list[tuple[Minibatch, TokenLoss]] = []

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        self.seen.append((minibatch, loss))
        return Metrics(values={"loss": float(len(self.seen)), "logprob_change": 0.5 * len(self.seen)})

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


WHOLE = rollouts(sequences([2, 3], [[1, 2, 3], [4, 5]]))


def advantages(given: Rollouts, values: list[float]) -> RolloutAdvantages:
    return RolloutAdvantages(values=Repeated(np.array(values, np.float32), given.response_ids.lengths))


ADVANTAGES = advantages(WHOLE, [1, 2, 3, 4, 5])


def columns(minibatch: Minibatch) -> Mapping[str, list[float]]:
    return {name: column.values.tolist() for name, column in minibatch.columns.items()}


def test_every_token_has_its_rollouts_advantage_and_counts_the_same() -> None:
    engine = Recorder()
    PolicyUpdate().run(engine, WHOLE, ADVANTAGES)
    ((minibatch, _),) = engine.seen
    assert columns(minibatch)["advantages"] == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5]
    assert minibatch.weights.values == pytest.approx([1 / 15] * 15)
    assert columns(minibatch)["old_logprobs"] == WHOLE.logprobs.values.tolist()
    assert "reference" not in minibatch.columns


def test_old_logprobs_and_reference_take_their_place() -> None:
    engine = Recorder()
    given = Logprobs(values=WHOLE.response_ids.like(np.arange(15, dtype=np.float32)))
    metrics = PolicyUpdate(kl_coef=0.1).run(engine, WHOLE, ADVANTAGES, reference=given, old_logprobs=given)
    ((minibatch, _),) = engine.seen
    assert columns(minibatch)["old_logprobs"] == columns(minibatch)["reference"] == list(range(15))
    # How far the sampler was apart is told by the loss.
    assert columns(minibatch)["sampler_logprobs"] == WHOLE.logprobs.values.tolist()
    assert "sampler_difference" not in metrics.values


def test_tokens_have_advantages_of_their_own() -> None:
    engine = Recorder()
    values = WHOLE.response_ids.like(np.arange(15, dtype=np.float32))
    PolicyUpdate(num_minibatches=2).run(engine, WHOLE, TokenAdvantages(values=values, excluded=np.zeros(5, np.bool_)))
    assert [columns(minibatch)["advantages"] for minibatch, _ in engine.seen] == [list(range(6)), list(range(6, 15))]


def test_excluded_rollouts_change_nothing() -> None:
    reference = Logprobs(values=WHOLE.response_ids.like(np.arange(15, dtype=np.float32)))
    excluded = np.array([False, True, False, False, True])
    of_tokens = WHOLE.response_ids.like(np.repeat(np.array([1, np.nan, 3, 4, np.nan], np.float32), [1, 2, 3, 4, 5]))
    kept = np.flatnonzero(~excluded)
    expected, ours, theirs = Recorder(), Recorder(), Recorder()
    node, few = PolicyUpdate(num_minibatches=2), reference.take(kept)
    node.run(expected, WHOLE.take(kept), ADVANTAGES.take(kept), few, few)
    node.run(ours, WHOLE, advantages(WHOLE, [1, np.nan, 3, 4, np.nan]), reference, reference)
    node.run(theirs, WHOLE, TokenAdvantages(values=of_tokens, excluded=excluded), reference, reference)
    for (one, _), (other, _), (third, _) in zip(expected.seen, ours.seen, theirs.seen, strict=True):
        assert one.keys.tolist() == other.keys.tolist() == third.keys.tolist()
        assert columns(one) == columns(other) == columns(third)
        assert one.weights.values.tolist() == other.weights.values.tolist() == third.weights.values.tolist()


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1 / 15] * 5),
        ({"aggregation": "sequence"}, [1 / 5 / length for length in (1, 2, 3, 4, 5)]),
        ({"aggregation": "constant", "constant_length": 8}, [1 / 40] * 5),
    ],
)
def test_the_weight_of_a_token(options: Any, weights: list[float]) -> None:
    """Responses of 1, 2, 3, 4 and 5 tokens."""
    engine = Recorder()
    PolicyUpdate(**options).run(engine, WHOLE, ADVANTAGES)
    ((minibatch, _),) = engine.seen
    assert minibatch.weights.values == pytest.approx(np.repeat(weights, [1, 2, 3, 4, 5]))


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [0, 1 / 6, 0, 1 / 6, 0]),
        ({"aggregation": "sequence"}, [0, 1 / 2 / 2, 0, 1 / 2 / 4, 0]),
        ({"aggregation": "constant", "constant_length": 8}, [0, 1 / 16, 0, 1 / 16, 0]),
    ],
)
def test_truncated_responses_change_nothing(options: Any, weights: list[float]) -> None:
    engine = Recorder()
    given = replace(WHOLE, finished=np.array([False, True, False, True, False]))
    PolicyUpdate(skip_truncated=True, **options).run(engine, given, ADVANTAGES)
    ((minibatch, _),) = engine.seen
    assert minibatch.weights.values == pytest.approx(np.repeat(weights, [1, 2, 3, 4, 5]))


@pytest.mark.parametrize("truncated", [True, False])
def test_where_nothing_counts_there_is_no_step(truncated: bool) -> None:
    """The moments of the step before would make one of it."""
    engine, node = TorchEngine(spec()), PolicyUpdate(skip_truncated=True, num_minibatches=2, num_epochs=3)
    node.run(engine, WHOLE, ADVANTAGES)
    before = {name: value.clone() for name, value in engine.weights()}
    given = replace(WHOLE, finished=np.zeros(5, np.bool_)) if truncated else WHOLE
    metrics = node.run(engine, given, ADVANTAGES if truncated else advantages(WHOLE, [np.nan] * 5)).values
    assert metrics == {"skipped": 6 if truncated else 3}
    assert all((value == before[name]).all() for name, value in engine.weights())


def test_a_minibatch_without_a_row_that_counts_is_left_out() -> None:
    engine = Recorder()
    given = replace(WHOLE, finished=np.array([False, False, False, True, True]))
    metrics = PolicyUpdate(skip_truncated=True, num_minibatches=2).run(engine, given, ADVANTAGES).values
    assert [len(minibatch) for minibatch, _ in engine.seen] == [2]
    assert metrics == {"loss": 1, "logprob_change": 0.5, "sampler_difference": 0.5, "skipped": 1}


@pytest.mark.parametrize(
    ("node", "connected", "message"),
    [
        (PolicyUpdate(kl_coef=0.1), [], "kl_coef: 0.1 needs the reference's logprobs"),
        (PolicyUpdate(kl_target=0.1), ["reference"], "kl_coef: expected a start value above 0 for kl_target, got 0"),
        (GspoUpdate(correction=Correction()), ["reference"], "correction: needs the logprobs of the role that is"),
        (PolicyUpdate(aggregation="constant"), [], "constant_length: is None, and aggregation is 'constant'"),
        (
            CispoUpdate(correction=Correction(min_ratio=1, max_ratio=1, outside="mask")),
            ["old_logprobs"],
            "correction.min_ratio: 1 is max_ratio as well, so no ratio between them is left",
        ),
        (CispoUpdate(constant_length=5), [], "constant_length: is 5, and aggregation is 'token'"),
    ],
)
def test_options_that_do_not_go_together(node: Any, connected: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        node.check(frozenset(connected))
    assert str(raised.value).startswith(message)


def test_minibatches_and_epochs() -> None:
    engine = Recorder()
    metrics = PolicyUpdate(num_minibatches=2, num_epochs=2).run(engine, WHOLE, ADVANTAGES)
    assert [len(minibatch) for minibatch, _ in engine.seen] == [3, 2, 3, 2]
    assert [float(minibatch.weights.values.sum()) for minibatch, _ in engine.seen] == pytest.approx([1] * 4)
    assert metrics.values == {"loss": 2.5, "logprob_change": 1.25, "sampler_difference": 0.5}


def test_more_minibatches_than_rows() -> None:
    engine = Recorder()
    PolicyUpdate(num_minibatches=9).run(engine, WHOLE, ADVANTAGES)
    assert [len(minibatch) for minibatch, _ in engine.seen] == [1] * 5


def test_sft_takes_the_examples_as_they_are() -> None:
    engine = Recorder()
    SftUpdate().run(engine, Examples(**vars(sequences([2, 3], [[2], [1]]))))
    ((minibatch, _),) = engine.seen
    assert minibatch.columns == {}
    assert minibatch.response_ids.lengths.tolist() == [2, 1]


def test_resumed_rollouts_are_spread_over_the_minibatches() -> None:
    recorder = Recorder()
    given = rollouts(sequences([2] * 8, [[4]] * 8))
    given.keys[:, 0] = [3, 3, 3, 3, 4, 4, 4, 4]
    given.keys[:, 1] = [0, 1, 6, 7, 0, 1, 6, 7]
    PolicyUpdate(num_minibatches=2).run(recorder, given, advantages(given, [0] * 8))
    assert [minibatch.step for minibatch, _ in recorder.seen] == [4, 4]
    assert [sorted(minibatch.keys[:, 0].tolist()) for minibatch, _ in recorder.seen] == [[3, 3, 4, 4]] * 2
