"""The tokens of an environment are read by the model, and by no loss, advantage, reward or metric.

In these tests, columns have invalid values at the tokens of the environment.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from rlflow.batch import (
    Conversations,
    Logprobs,
    Repeated,
    Rewards,
    RolloutAdvantages,
    Rollouts,
    ValueEstimates,
)
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.advantages import BatchAdvantage, TokenAdvantage
from rlflow.nodes.critic import GaeAdvantage
from rlflow.nodes.policy_loss import Correction
from rlflow.nodes.policy_update import PolicyGradient, PolicyUpdate
from rlflow.nodes.policy_variants import CispoUpdate, GspoUpdate, ReinforceUpdate
from rlflow.nodes.reward_shaping import KlDivergence
from rlflow.runtime.step import metrics_of
from tests.helpers import conversations, rollouts, sequences, spec

# The lengths of the turns of each response: the model's, the environment's, the model's and so on.
TURNS = [[2, 3, 1], [4], [1, 2, 2, 1, 3], [3, 1]]
OWN = [np.repeat(np.arange(len(turns)) % 2 == 0, turns) for turns in TURNS]
ADVANTAGES = np.array([0.5, -1.0, 2.0, 0.25], np.float32)


def written() -> Conversations:
    made = conversations([TURNS[:2], TURNS[2:]], [[0.0] * count for count in (2, 1, 3, 1)])
    drawn = made.response_ids.like(column(0))
    return replace(made, logprobs=drawn, finished=np.array([True, True, True, False]))


def column(seed: int, garbage: float = np.nan) -> NDArray[np.float32]:
    values = -np.random.default_rng(seed).exponential(1, 23).astype(np.float32)
    return np.where(np.concatenate(OWN), values, np.float32(garbage))


GIVEN = written()


def of_tokens(seed: int, garbage: float = np.nan) -> Logprobs:
    return Logprobs(values=GIVEN.response_ids.like(column(seed, garbage)))


def test_own_tokens_are_counted_by_row() -> None:
    assert [GIVEN.own_tokens()[row].tolist() for row in range(4)] == [own.tolist() for own in OWN]
    assert GIVEN.own_lengths.tolist() == [3, 4, 6, 3]
    assert GIVEN.take(np.array([2, 0])).own_lengths.tolist() == [6, 3]
    assert [GIVEN.turn_lengths[row].tolist() for row in range(4)] == [[2, 1], [4], [1, 2, 3], [3]]
    assert GIVEN.take(np.array([2, 0])).turn_lengths.values.tolist() == [1, 2, 3, 2, 1]
    assert Conversations.concatenate([GIVEN, GIVEN]).own_lengths.tolist() == [3, 4, 6, 3] * 2


@pytest.mark.parametrize(
    "node",
    [
        PolicyUpdate(kl_coef=0.1, num_minibatches=2),
        PolicyUpdate(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01, aggregation="sequence"),
        PolicyUpdate(correction=Correction(level="sequence", max_ratio=3.0)),
        PolicyUpdate(aggregation="constant", constant_length=9, skip_truncated=True),
        GspoUpdate(aggregation="sequence"),
        CispoUpdate(correction=Correction(outside="mask")),
        ReinforceUpdate(),
    ],
    ids=lambda node: f"{type(node).__name__}-{node.aggregation}",
)
def test_losses_and_gradients_do_not_depend_on_columns_of_its_tokens(node: PolicyGradient) -> None:
    outcomes: list[tuple[Mapping[str, float], NDArray[np.float32]]] = []
    for garbage in (0.0, np.nan):
        engine = TorchEngine(spec(micro_batch_tokens=24))
        given = replace(GIVEN, logprobs=GIVEN.response_ids.like(column(0, garbage)))
        values = GIVEN.response_ids.like(np.repeat(ADVANTAGES, GIVEN.response_ids.lengths))
        advantages = RolloutAdvantages(values=Repeated(ADVANTAGES, values.lengths))
        others = (of_tokens(1, garbage), of_tokens(2, garbage))
        metrics = node.run(engine, given, advantages, *others).values
        outcomes.append((metrics, engine.logprobs(GIVEN, 1.0).values.values))
    (one, scores), (other, others_scores) = outcomes
    assert all(np.isfinite(value) for value in one.values())
    assert one == other
    assert scores.tolist() == others_scores.tolist()


def test_a_ratio_of_a_response_is_that_of_the_models_tokens() -> None:
    """GSPO and a correction by sequence add up over a response: by hand, over the model's tokens alone."""
    engine = TorchEngine(spec())
    new = engine.logprobs(GIVEN, 1.0).values
    old, sampler = of_tokens(1).values, GIVEN.logprobs
    expected, corrections, total = 0.0, 0.0, int(GIVEN.own_lengths.sum())
    for row, own in enumerate(OWN):
        difference = new[row][own].astype(np.float64) - old[row][own]
        ratio = np.exp(difference.mean())
        correction = min(np.exp((old[row][own].astype(np.float64) - sampler[row][own]).sum()), 2.0)
        clipped = np.clip(ratio, 1 - 3e-4, 1 + 4e-4)
        loss = -min(ratio * ADVANTAGES[row], clipped * ADVANTAGES[row]) * correction
        expected += loss * own.sum() / total
        corrections += correction * own.sum() / total
    advantages = RolloutAdvantages(values=Repeated(ADVANTAGES, GIVEN.response_ids.lengths))
    node = GspoUpdate(correction=Correction(level="sequence"), aggregation="token")
    metrics = node.run(engine, GIVEN, advantages, old_logprobs=of_tokens(1)).values
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["correction"] == pytest.approx(corrections, rel=1e-5)


def test_generalised_advantages_go_from_one_of_the_models_tokens_to_the_next() -> None:
    """They are those of conversations from which the environment's tokens are cut out."""
    node, rewards = GaeAdvantage(kl_coef=0.1, gamma=0.9), Rewards(values=np.array([1.0, 0.0, 0.5, 0.25], np.float32))
    out = node.run(GIVEN, rewards, ValueEstimates(values=of_tokens(3).values), of_tokens(1))
    mask, cut = np.concatenate(OWN), rollouts(sequences([3, 2], [[3, 4], [6, 3]]))
    drawn, reference, values = (cut.response_ids.like(column(seed)[mask]) for seed in (0, 1, 3))
    expected = node.run(
        replace(cut, logprobs=drawn), rewards, ValueEstimates(values=values), Logprobs(values=reference)
    )
    for name in ("values", "returns"):
        given = getattr(out, name).values
        assert given[mask].tolist() == getattr(expected, name).values.tolist()
        assert not given[~mask].any()
    assert (out.kl, out.explained_variance) == (expected.kl, expected.explained_variance)


def test_divergences_add_up_over_the_models_tokens() -> None:
    reference = of_tokens(1)
    out = KlDivergence().run(GIVEN, reference).values
    expected = [
        (GIVEN.logprobs[row][own].astype(np.float64) - reference.values[row][own]).sum() for row, own in enumerate(OWN)
    ]
    assert out.tolist() == pytest.approx(expected, rel=1e-6)


def test_advantages_are_normalised_over_the_models_tokens() -> None:
    rewards = Rewards(values=np.array([1.0, 0.0, 0.5, 0.25], np.float32))
    reference = of_tokens(1)
    out = TokenAdvantage(kl_coef=0.1).run(GIVEN, rewards, reference).values
    raw = []
    for row, own in enumerate(OWN):
        kl = GIVEN.logprobs[row][own].astype(np.float64) - reference.values[row][own]
        raw.append([float(rewards.values[row]) - 0.1 * kl[at:].sum() for at in range(len(kl))])
    every = np.concatenate(raw)
    for row, own in enumerate(OWN):
        expected = (np.array(raw[row]) - every.mean()) / every.std()
        assert out[row][own] == pytest.approx(expected, rel=1e-5)
    centred = np.array([0.5, -0.5, 0.125, -0.125])
    weights = np.array([3, 4, 6, 3])
    mean = np.average(centred, weights=weights)
    deviation = np.sqrt(np.average((centred - mean) ** 2, weights=weights))
    given = BatchAdvantage().run(GIVEN, rewards).values
    assert given.run_values == pytest.approx((centred - mean) / deviation, rel=1e-5)


def test_lengths_are_the_models() -> None:
    metrics = metrics_of("rollouts", GIVEN)
    assert (metrics["rollouts/length_mean"], metrics["rollouts/length_max"]) == (4.0, 6)
    assert (metrics["rollouts/turns_mean"], metrics["rollouts/failed"]) == (1.75, 0.0)


def test_all_tokens_of_plain_rollouts_are_the_models() -> None:
    plain: Rollouts = rollouts(sequences([3], [[2, 4]]))
    assert plain.own_tokens().values.all()
    assert plain.own_lengths.tolist() == [2, 4]
