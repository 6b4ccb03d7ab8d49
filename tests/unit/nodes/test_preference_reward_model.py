"""The loss of a reward model, where its reward is read, and what is done without one."""

from math import log1p
from pathlib import Path

import numpy as np
import pytest
import torch

from rlflow.batch import Minibatch, Packed, Rewards, Sequences
from rlflow.engines.base import TrainsReward
from rlflow.engines.causal_lm.totals import LossTotals
from rlflow.engines.fake import FakeEngine
from rlflow.engines.torch import TorchEngine
from rlflow.errors import EngineError, RecipeError
from rlflow.nodes.minibatches import Weighting
from rlflow.nodes.preference import RankingLoss, RewardModelUpdate
from rlflow.nodes.scoring import RewardModel
from rlflow.recipe import Model, Optimizer
from tests.helpers import pairs, rollouts, sequences, spec


def test_against_a_plain_loop() -> None:
    given, draw = pairs(7), np.random.default_rng(1)
    said = draw.normal(0, 1, len(given.response_ids.values))
    outputs = torch.tensor(said, requires_grad=True)
    batch = Minibatch(
        **vars(given.as_sequences()),
        step=0,
        columns={},
        weights=Weighting(aggregation="sequence").weights(
            given.response_ids.lengths, np.ones(14, np.bool_), given.keys[:, :2]
        ),
    )
    totals = LossTotals(RankingLoss(), torch.device("cpu"), "actor")
    total = totals.add(batch, outputs, {})
    (slopes,) = torch.autograd.grad(total, outputs)

    loss, right, expected = 0.0, 0, np.zeros(len(said))
    for pair in range(7):
        chosen, rejected = (given.response_ids.offsets[row + 1] - 1 for row in (2 * pair, 2 * pair + 1))
        margin = said[chosen] - said[rejected]
        loss += log1p(np.exp(-margin))
        right += margin > 0
        expected[chosen] -= 1 / (1 + np.exp(margin)) / 7
        expected[rejected] += 1 / (1 + np.exp(margin)) / 7
    assert float(total.detach()) == pytest.approx(loss / 7, rel=1e-6)
    assert slopes.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-8)
    assert totals.sums["accuracy"] == pytest.approx(right / 7, rel=1e-6)


def engine(**options: object) -> TorchEngine:
    return TorchEngine(spec(capabilities=["Trains", "Evaluates"], **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batch_tokens", [4096, 12, 1])
def test_a_reward_is_that_of_the_last_token(micro_batch_tokens: int) -> None:
    ours = engine(micro_batch_tokens=micro_batch_tokens)
    given = sequences([3, 2], [[4, 1], [2]])
    rewards = ours.evaluate(given).values
    ours._model.config._attn_implementation = "eager"
    for row in range(3):
        ids = torch.tensor(np.concatenate([given.prompt_ids[row], given.response_ids[row]]))[None].long()
        with torch.no_grad():
            assert rewards[row] == pytest.approx(float(ours._model(input_ids=ids).logits[0, -1, 0]), abs=1e-5)


def test_it_learns_its_pairs() -> None:
    ours, given = engine(optimizer=Optimizer(learning_rate=1e-2)), pairs(8)
    node = RewardModelUpdate()
    before = node.accuracy(ours, given)
    for _ in range(20):
        metrics = node.run(ours, given).values
    assert before < 0.9
    assert node.accuracy(ours, given) == 1.0
    assert metrics["margin"] > 1


def test_the_export_is_a_reward_model_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    ours, given = engine(), sequences([3, 2], [[4, 1], [2]])
    ours.export(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(plain).__name__ == plain.config.architectures[0] == "Qwen3ForSequenceClassification"
    rewards = ours.evaluate(given).values
    for row in range(3):
        ids = torch.tensor(np.concatenate([given.prompt_ids[row], given.response_ids[row]]))[None].long()
        with torch.no_grad():
            assert rewards[row] == pytest.approx(float(plain(input_ids=ids).logits[0, 0]), abs=1e-5)
    back = TorchEngine(spec(model=Model(path=str(tmp_path), dtype="float32"), capabilities=["Evaluates"]))
    assert back.evaluate(given).values.tolist() == rewards.tolist()


def test_padding_is_named_where_it_does_not_hide_the_end_token(tmp_path: Path) -> None:
    """A row that is padded by whoever reads the exported model has the reward that it has here."""
    from transformers import AutoModelForSequenceClassification

    ours, given = engine(), sequences([3], [[4, 1]])
    ours.export(tmp_path / "pads with the end token")
    ours._tokenizer.pad_token = "="
    ours.export(tmp_path / "pads with another")
    first, second = map(
        AutoModelForSequenceClassification.from_pretrained,
        (tmp_path / "pads with the end token", tmp_path / "pads with another"),
    )
    assert (first.config.pad_token_id, second.config.pad_token_id) == (None, ours._tokenizer.pad_token_id)
    rows = [np.concatenate([given.prompt_ids[row], given.response_ids[row]]) for row in range(2)]
    rows = [np.where(row == second.config.pad_token_id, 1, row) for row in rows]
    padded = torch.full((2, 7), second.config.pad_token_id)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    changed = Sequences(
        keys=given.keys,
        prompt_ids=Packed.from_rows([row[:3] for row in rows], np.int32),
        response_ids=Packed.from_rows([row[3:] for row in rows], np.int32),
    )
    with torch.no_grad():
        read = second(input_ids=padded, attention_mask=(padded != second.config.pad_token_id).long()).logits[:, 0]
    assert read.numpy() == pytest.approx(ours.evaluate(changed).values, abs=1e-5)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    TorchEngine(spec()).export(tmp_path)
    model = Model(path=str(tmp_path), dtype="float32")
    with pytest.raises(RecipeError) as raised:
        TorchEngine(spec(model=model, capabilities=["Evaluates"]))
    assert str(raised.value) == (
        f"models.policy.path: '{tmp_path}' is no reward model: "
        "1 weight is missing from the checkpoint (score.weight).\n"
        "  Fix: for rewards, use a sequence classification model with one label, as reward_model_update exports it."
    )
    # A role that is trained gets a new head.
    assert TorchEngine(spec(model=model, capabilities=["Trains", "Evaluates"]))


class Broken(FakeEngine):
    def evaluate(self, sequences: Sequences) -> Rewards:
        return Rewards(values=np.array([1, np.nan, np.inf], np.float32))


def test_a_reward_that_is_no_number_ends_the_run() -> None:
    """NaN would leave the response out in silence."""
    given = rollouts(sequences([3], [[4, 1, 2]]))
    assert RewardModel().run(FakeEngine(spec()), given).values.tolist() == [4, 1, 2]
    with pytest.raises(EngineError, match="the reward model gives no finite number for 2 of 3 responses"):
        RewardModel().run(Broken(spec()), given)


def test_the_update_asks_for_both() -> None:
    assert RewardModelUpdate.capability() is TrainsReward
