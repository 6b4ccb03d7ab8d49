from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Advantages, Examples, Logprobs, Metrics, Minibatch
from rlflow.engines.base import TokenLoss
from rlflow.nodes.update import PolicyUpdate, SftUpdate
from tests.helpers import rollouts, sequences


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
ADVANTAGES = Advantages(values=np.array([1, 2, 3, 4, 5], np.float32))


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


def test_what_was_begun_earlier_is_spread_over_the_minibatches_of_the_latest_step() -> None:
    recorder = Recorder()
    given = rollouts(sequences([2] * 8, [[4]] * 8))
    given.keys[:, 0] = [3, 3, 3, 3, 4, 4, 4, 4]
    given.keys[:, 1] = [0, 1, 6, 7, 0, 1, 6, 7]
    PolicyUpdate(num_minibatches=2).run(recorder, given, Advantages(values=np.zeros(8, np.float32)))
    assert [minibatch.step for minibatch, _ in recorder.seen] == [4, 4]
    assert [sorted(minibatch.keys[:, 0].tolist()) for minibatch, _ in recorder.seen] == [[3, 3, 4, 4]] * 2


def test_excluded_rollouts_are_in_no_minibatch() -> None:
    excluded, without = Recorder(), Recorder()
    kept = np.array([0, 2, 3])
    values = np.array([1, np.nan, 3, 4, np.nan], np.float32)
    given = Logprobs(values=WHOLE.response_ids.like(np.arange(15, dtype=np.float32)))
    node = PolicyUpdate(kl_coef=0.1, num_minibatches=2)
    node.run(excluded, WHOLE, Advantages(values=values), reference=given, old_logprobs=given)
    few = given.take(kept)
    node.run(without, WHOLE.take(kept), Advantages(values=values[kept]), reference=few, old_logprobs=few)
    assert len(excluded.seen) == len(without.seen) == 2
    for (ours, _), (theirs, _) in zip(excluded.seen, without.seen, strict=True):
        assert ours.keys.tolist() == theirs.keys.tolist()
        assert columns(ours) == columns(theirs)
        assert ours.weights.values.tolist() == theirs.weights.values.tolist()
