"""Responses in segments: what a model reads, and that cutting a conversation into segments changes no result."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlflow.batch import Conversations, Logprobs, Packed, Repeated, Rewards, RolloutAdvantages, ValueEstimates
from rlflow.batch.segments import part_keys, unfold
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.advantages import GroupAdvantage
from rlflow.nodes.critic import GaeAdvantage, ValueUpdate
from rlflow.nodes.policy_loss import Correction
from rlflow.nodes.policy_update import PolicyGradient, PolicyUpdate
from rlflow.nodes.policy_variants import ReinforceUpdate
from rlflow.nodes.turns import TurnAdvantage
from tests.helpers import conversations, minibatch, spec

TURNS = [[[2, 3, 1], [1, 1, 2, 2, 3]], [[4], [3, 1, 2]]]
WHOLE = conversations(TURNS, [[1.0, 2.0], [0.0, 4.0, 1.0], [5.0], [0.0, 3.0]])
IS_OWN = WHOLE.own_tokens().values
DRAW = np.random.default_rng(1)


def cut(whole: Conversations) -> Conversations:
    """Cut each conversation before each turn: all before it is the turn's prompt."""
    prompts: list[list[Any]] = []
    for row in range(len(whole)):
        tokens, turn = whole.response_ids[row], whole.turn[row]
        starts = [int(np.flatnonzero(turn == number)[0]) for number in range(int(turn.max()) + 1)]
        prompts.append([np.concatenate([whole.prompt_ids[row], tokens[:start]]) for start in starts])
    counts = np.array([len(row) for row in prompts])
    numbers = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
    own = whole.own_tokens().values
    offsets = np.concatenate([[0], np.cumsum(whole.own_lengths)])
    segments = Repeated(numbers, whole.turn_lengths.values, counts)
    return replace(
        whole,
        prompt_ids=Packed.from_rows([np.concatenate(row) for row in prompts], np.int32),
        response_ids=Packed(whole.response_ids.values[own], offsets),
        logprobs=Packed(whole.logprobs.values[own], offsets),
        versions=Repeated(np.zeros(len(whole), np.int32), whole.own_lengths),
        turn=segments,
        prompt_segments=Repeated(numbers, np.array([len(prompt) for row in prompts for prompt in row]), counts),
        response_segments=segments,
    )


WHOLE = replace(
    WHOLE, logprobs=WHOLE.response_ids.like(np.where(IS_OWN, -DRAW.exponential(2, len(IS_OWN)), 0).astype(np.float32))
)
CUT = cut(WHOLE)


def of_tokens(seed: int) -> tuple[Packed, Packed]:
    """Return random numbers for the tokens of whole conversations, and those of the model's own for the cut ones."""
    values = -np.random.default_rng(seed).exponential(1, len(IS_OWN)).astype(np.float32)
    return WHOLE.response_ids.like(values), CUT.response_ids.like(values[IS_OWN])


def test_a_model_reads_each_segment_after_its_own_prompt() -> None:
    rows = unfold(CUT.as_sequences())
    assert rows.response_ids.lengths.tolist() == [2, 1, 1, 2, 3, 4, 3, 2]
    # The prompts have two tokens, and the first turn and its answer in the first conversation have two and three.
    assert rows.prompt_ids.lengths.tolist() == [2, 7, 2, 4, 8, 2, 2, 6]
    first = np.concatenate([WHOLE.prompt_ids[0], WHOLE.response_ids[0]])
    assert np.concatenate([rows.prompt_ids[1], rows.response_ids[1]]).tolist() == first.tolist()
    later = [[0, 2**40, 0], [0, 2**40 + 1, 0], [0, 2**41 + 1, 0], [0, 2**40 + 2**20 + 1, 0]]
    assert rows.keys[[1, 3, 4, 7]].tolist() == later
    assert rows.keys[[0, 2, 5, 6]].tolist() == WHOLE.keys.tolist()
    given = minibatch(CUT.as_sequences(), old=np.arange(18))
    assert unfold(given).columns["old"][4].tolist() == [6, 7, 8]
    assert unfold(WHOLE) is WHOLE


def test_the_keys_of_parts_differ() -> None:
    keys = np.array([[7, 3, 1], [7, 3, 2], [7, 4, 1]])
    all_keys = np.concatenate([part_keys(keys, np.full(3, number)) for number in range(5)])
    assert len(np.unique(all_keys, axis=0)) == 15


def test_rows_that_are_taken_keep_their_segments() -> None:
    rows = np.array([3, 1])
    assert unfold(CUT.take(rows).as_sequences()).response_ids.lengths.tolist() == [3, 2, 1, 2, 3]


@pytest.mark.parametrize("capability", ["Scores", "Values"])
def test_scores_are_those_of_the_whole(capability: str) -> None:
    engine = TorchEngine(spec(capabilities=["Trains", capability], micro_batch_tokens=24))
    if capability == "Scores":
        ours, whole = engine.logprobs(CUT.as_sequences(), 1.0).values, engine.logprobs(WHOLE, 1.0).values
    else:
        ours, whole = engine.values(CUT.as_sequences()).values, engine.values(WHOLE).values
    assert ours.offsets.tolist() == CUT.response_ids.offsets.tolist()
    assert ours.values == pytest.approx(whole.values[IS_OWN], abs=1e-6)


def test_advantages_are_those_of_the_whole() -> None:
    rewards = Rewards(values=np.array([3, 5, 5, 3], np.float32), turns=WHOLE.turn_rewards)
    both = tuple(zip((WHOLE, CUT), of_tokens(2), of_tokens(3), strict=True))
    gae = GaeAdvantage(kl_coef=0.1, gamma=0.9)
    for whole, ours in (
        [TurnAdvantage().run(batch, rewards) for batch, _, _ in both],
        [gae.run(batch, rewards, ValueEstimates(values=one), Logprobs(values=two)) for batch, one, two in both],
    ):
        assert ours.values.values == pytest.approx(whole.values.values[IS_OWN], abs=1e-6)
    of_groups = [GroupAdvantage().run(batch, rewards).values.run_values.tolist() for batch in (WHOLE, CUT)]
    assert of_groups[0] == of_groups[1]


@pytest.mark.parametrize(
    "node",
    [
        PolicyUpdate(kl_coef=0.1, num_minibatches=2, entropy_coef=0.01),
        PolicyUpdate(aggregation="sequence", correction=Correction(outside="mask")),
        ReinforceUpdate(),
    ],
    ids=lambda node: f"{type(node).__name__}-{node.aggregation}",
)
def test_gradients_are_those_of_the_whole(node: PolicyGradient) -> None:
    advantages = np.array([0.5, -1.0, 2.0, 0.25], np.float32)
    reference, old = of_tokens(2), of_tokens(3)
    outcomes: list[tuple[dict[str, float], NDArray[np.float32]]] = []
    for number, batch in enumerate((WHOLE, CUT)):
        engine = TorchEngine(spec(micro_batch_tokens=24))
        given = RolloutAdvantages(values=Repeated(advantages, batch.response_ids.lengths))
        metrics = node.run(
            engine, batch, given, Logprobs(values=reference[number]), Logprobs(values=old[number])
        ).values
        outcomes.append((dict(metrics), engine.logprobs(WHOLE, 1.0).values.values))
    (whole, scores), (ours, our_scores) = outcomes
    assert ours == pytest.approx(whole, abs=1e-6, rel=1e-6)
    assert our_scores == pytest.approx(scores, abs=1e-6)


def test_a_critic_learns_the_same() -> None:
    outcomes = []
    expected = of_tokens(2)
    for number, batch in enumerate((WHOLE, CUT)):
        engine = TorchEngine(spec(capabilities=["Trains", "Values"]))
        values = ValueEstimates(values=expected[number])
        rewards = Rewards(values=np.array([3, 5, 5, 3], np.float32), turns=WHOLE.turn_rewards)
        ValueUpdate().run(engine, batch, values, GaeAdvantage().run(batch, rewards, values))
        outcomes.append(engine.values(WHOLE).values.values)
    assert outcomes[1] == pytest.approx(outcomes[0], abs=1e-6)


def test_each_segment_has_its_part_of_the_routing() -> None:
    """A row has records for the first tokens, at most for all but the last of each segment."""
    whole = unfold(CUT.as_sequences())
    assert (whole.prompt_ids.lengths + whole.response_ids.lengths - 1).tolist() == [3, 7, 2, 5, 10, 5, 4, 7]
    lengths = [3 + 7, 2 + 5 + 10, 0, 4 + 4]
    routing = Packed.from_rows([np.zeros(length, "V2") for length in lengths], "V2")
    rows = unfold(replace(CUT.as_sequences(), routing=routing))
    assert rows.routing is not None
    assert rows.routing.lengths.tolist() == [3, 7, 2, 5, 10, 0, 4, 4]
