"""The minibatches of an epoch, and rows without tokens to train on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import (
    Logprobs,
    Metrics,
    Minibatch,
    Repeated,
    Rewards,
    RolloutAdvantages,
    ValueEstimates,
)
from rlflow.engines.base import TokenLoss
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.critic import GaeAdvantage, ValueUpdate
from rlflow.nodes.policy_update import PolicyUpdate
from rlflow.nodes.policy_variants import GspoUpdate
from rlflow.runtime.finite import check_advantages
from rlflow.runtime.step import metrics_of
from tests.helpers import conversations, rollouts, sequences, spec

WRITTEN = rollouts(sequences([2] * 8, [[3, 1], [2, 2], [1, 4], [2, 2], [1, 1], [3, 2], [2, 5], [1, 1]]))
ADVANTAGES = RolloutAdvantages(values=Repeated(np.ones(16, np.float32), WRITTEN.response_ids.lengths))


class Recorder:
    """The keys of the minibatches that it is trained on."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, ...]]] = []

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        self.seen.append([tuple(key) for key in minibatch.keys.tolist()])
        return Metrics(values={"loss": 0.0, "logprob_change": 0.0})

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def minibatches(num_minibatches: int, num_epochs: int, step: int = 0) -> list[list[tuple[int, ...]]]:
    keys = WRITTEN.keys.copy()
    keys[:, 0] = step
    engine = Recorder()
    node = PolicyUpdate(num_minibatches=num_minibatches, num_epochs=num_epochs)
    node.run(engine, replace(WRITTEN, keys=keys), ADVANTAGES)
    return engine.seen


def test_every_epoch_has_all_rows_once_in_other_minibatches() -> None:
    seen = minibatches(4, 3)
    epochs = [seen[:4], seen[4:8], seen[8:]]
    for epoch in epochs:
        assert sorted(key for part in epoch for key in part) == [tuple(key) for key in WRITTEN.keys.tolist()]
        assert [len(part) for part in epoch] == [4] * 4
    first, *others = ([{key[1] for key in part} for part in epoch] for epoch in epochs)
    assert first == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert all(sorted(map(sorted, other)) != sorted(map(sorted, first)) for other in others)
    assert others[0] != others[1]


def test_the_rows_of_a_prompt_stay_neighbours() -> None:
    for part in minibatches(4, 3):
        assert [key[1] for key in part[0::2]] == [key[1] for key in part[1::2]]


def test_the_draws_follow_from_the_step_alone() -> None:
    assert minibatches(4, 2, step=5) == minibatches(4, 2, step=5)
    prompts = [[[key[1] for key in part] for part in minibatches(4, 2, step)[4:]] for step in (5, 6)]
    assert prompts[0] != prompts[1]


def test_a_critic_has_the_minibatches_of_the_policy() -> None:
    critic = Recorder()
    zeros = ValueEstimates(values=WRITTEN.response_ids.like(np.zeros(WRITTEN.response_ids.offsets[-1], np.float32)))
    advantages = GaeAdvantage().run(WRITTEN, Rewards(values=np.arange(16, dtype=np.float32)), zeros)
    ValueUpdate(num_minibatches=4, num_epochs=3).run(critic, WRITTEN, zeros, advantages)
    assert critic.seen == minibatches(4, 3)


# The second and the last have no token of the model's.
SILENT = conversations([[[2], [0, 3]], [[1], [0, 2]]], [[0.0]] * 4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "node",
    [
        PolicyUpdate(),
        PolicyUpdate(aggregation="sequence"),
        PolicyUpdate(aggregation="constant", constant_length=3),
        GspoUpdate(),
    ],
    ids=lambda node: f"{node.kind}-{node.aggregation}",
)
def test_a_response_without_tokens_of_its_own_is_as_if_it_were_not_there(node: PolicyUpdate) -> None:
    given, kept = SILENT, np.array([0, 2])
    advantages = RolloutAdvantages(values=Repeated(np.array([1, 5, -2, 7], np.float32), given.response_ids.lengths))
    ours = node.run(TorchEngine(spec()), given, advantages).values
    theirs = node.run(TorchEngine(spec()), given.take(kept), advantages.take(kept)).values
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert metrics_of("rollouts", given)["rollouts/without_tokens"] == 0.5


@pytest.mark.filterwarnings("error")
def test_generalized_advantages_of_such_a_response() -> None:
    """The reward of such a response reaches no token."""
    given, kept = SILENT, np.array([0, 2])
    draw = np.random.default_rng(0)
    values, reference = (
        given.response_ids.like(draw.normal(size=given.response_ids.offsets[-1]).astype(np.float32)) for _ in range(2)
    )
    rewards = Rewards(values=np.array([1, 100, 3, 1000], np.float32))
    node = GaeAdvantage(kl_coef=0.1)
    inputs: dict[str, Any] = {
        "rollouts": given,
        "rewards": rewards,
        "values": ValueEstimates(values=values),
        "reference": Logprobs(values=reference),
    }
    ours = node.run(**inputs)
    theirs = node.run(**{name: batch.take(kept) for name, batch in inputs.items()})
    assert ours.is_included.tolist() == [True, False, True, False]
    check_advantages(ours, inputs)
    own = given.own_tokens().values
    assert ours.values.values[own] == pytest.approx(theirs.values.values[theirs.values.values != 0], abs=1e-6)
    assert ours.kl == pytest.approx(theirs.kl)
