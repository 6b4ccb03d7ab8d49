"""Training of parts of a vision-language model, and engines that follow it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Packed, Prompts, Sequences
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.causal_lm.adapters import is_adapter
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.engines.vision.base import Pixels, find_family, load_vision
from rlflow.errors import EngineError, RecipeError
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Model, Optimizer
from rlflow.resources.models.lora import Lora
from rlflow.resources.models.vision import TrainedParts, list_parts
from tests.helpers import minibatch, spec
from tests.unit.engines.vision.test_passes import build_case, vision_spec
from tests.vision_models import KINDS

pytestmark = pytest.mark.slow


def actor(kind: str, train: TrainedParts = "language", lora: Lora | None = None) -> EngineSpec:
    optimizer = Optimizer(learning_rate=1e-2)
    return replace(vision_spec(kind, "Trains", "Scores"), train=train, lora=lora, optimizer=optimizer)


@pytest.mark.parametrize(
    ("kind", "train"), [("idefics3", "language"), ("qwen3_vl", "all"), ("internvl", ("projector",))]
)
def test_only_these_parts_are_trained(kind: str, train: TrainedParts) -> None:
    engine, sequences, family = TorchEngine(actor(kind, train)), build_case(kind).sequences, find_family(kind)
    assert family is not None
    before = {name: weight.detach().clone() for name, weight in engine._model.named_parameters()}
    engine.update(minibatch(sequences), LikelihoodLoss())
    changed = {
        family.part_of(name)
        for name, weight in engine._model.named_parameters()
        if not bool((weight == before[name]).all())
    }
    assert changed == set(list_parts(train))


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_follows_sees_with_the_trained_tower(kind: str, tmp_path: Path) -> None:
    """The trainer, the engine that follows it and the exported model agree on the logprobs of samples."""
    engine, follower = TorchEngine(actor(kind, "all")), TransformersEngine(vision_spec(kind, "Generates"))
    firsts = build_case(kind).sequences.take(np.arange(0, 15, 3))
    prompts = Prompts(keys=firsts.keys, ids=firsts.prompt_ids, rows=[{}] * len(firsts), images=firsts.images)
    for step in range(2):
        engine.update(minibatch(firsts, step=step), LikelihoodLoss())
    follower.load_weights(engine.weights(), 1)
    rollouts = follower.generate(prompts, Sampling(max_tokens=6, group_size=2))
    trained = engine.logprobs(rollouts, 1.0).values.values
    np.testing.assert_allclose(rollouts.logprobs.values, trained, atol=2e-6)
    assert np.abs(TorchEngine(actor(kind)).logprobs(rollouts, 1.0).values.values - trained).max() > 1e-2
    engine.export(tmp_path)
    exported = Model(path=str(tmp_path), dtype="float32")
    again = TorchEngine(replace(actor(kind), model=exported)).logprobs(rollouts, 1.0).values.values
    np.testing.assert_allclose(again, trained, atol=2e-6)
    assert load_vision("policy", exported, engine._tokenizer).image_ids(40, 24).tolist()


def test_a_frozen_tower_is_not_sent() -> None:
    engine = TorchEngine(replace(actor("internvl"), synced_parts=("language",)))
    follower = TransformersEngine(replace(vision_spec("internvl", "Generates"), synced_parts=("language",)))
    firsts, family = build_case("internvl").sequences.take(np.arange(0, 15, 3)), find_family("internvl")
    assert family is not None
    engine.update(minibatch(firsts), LikelihoodLoss())
    assert {family.part_of(name) for name, _ in engine.weights()} == {"language"}
    follower.load_weights(engine.weights(), 1)
    trained, followed = (model.logprobs(firsts, 1.0).values.values for model in (engine, follower))
    np.testing.assert_allclose(followed, trained, atol=2e-6)
    with pytest.raises(EngineError, match="the weights lack 'model"):
        TransformersEngine(vision_spec("internvl", "Generates")).load_weights(engine.weights(), 1)


def test_adapters_are_in_the_language_part_alone() -> None:
    engine = TorchEngine(actor("qwen2_5_vl", lora=Lora(rank=4)))
    adapters = [name for name, _ in engine._model.named_parameters() if is_adapter(name)]
    # A and B of seven layers in each of two decoder layers.
    assert len(adapters) == 2 * 7 * 2
    assert all(name.startswith("model.language_model.") for name in adapters)
    engine.update(minibatch(build_case("qwen2_5_vl").sequences), LikelihoodLoss())


def test_passes_are_limited_in_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest prompt has 132 tokens of images, each of four patches: a pass has that, and another the rest."""
    of, sequences = actor("internvl"), build_case("internvl").sequences
    engine = TorchEngine(of)
    assert engine._vision is not None
    together = engine.logprobs(sequences, 1.0).values.values
    family, encoded = engine._vision.family, list[int]()
    features = sum(
        int((ids == family.placeholder_id).sum()) for ids in map(sequences.prompt_ids.__getitem__, range(0, 15, 3))
    )
    engine._spec = replace(of, layout=replace(of.layout, micro_batch_patches=4 * features // 2))
    encode = family.encode

    def counted(model: Any, images: Sequence[Pixels]) -> Any:
        outputs = encode(model, images)
        encoded.append(len(outputs[0]))
        return outputs

    monkeypatch.setattr(family, "encode", counted)
    np.testing.assert_allclose(engine.logprobs(sequences, 1.0).values.values, together, atol=2e-6)
    assert len(encoded) > 1
    assert sum(encoded) == features


def test_frozen_parts_are_kept_in_the_models_own_type() -> None:
    of = actor("idefics3")
    engine = TorchEngine(replace(of, model=replace(of.model, dtype="bfloat16")))
    assert {str(weight.dtype) for weight in engine._model.parameters()} == {"torch.bfloat16"}


def test_a_text_model_has_no_parts_and_a_vision_model_no_scalar_head() -> None:
    with pytest.raises(RecipeError, match="reads text alone, and has none of the parts language, tower, projector"):
        TorchEngine(replace(spec(), train="all"))
    with pytest.raises(RecipeError, match="a value head is not supported on models of the type 'idefics3'"):
        TorchEngine(vision_spec("idefics3", "Values"))


def test_prompts_without_images_are_read_as_text() -> None:
    engine = TorchEngine(actor("qwen3_vl"))
    sequences = build_case("qwen3_vl").sequences.take(np.arange(3, 6))
    text = Sequences(keys=sequences.keys, prompt_ids=sequences.prompt_ids, response_ids=sequences.response_ids)
    with_column = engine.logprobs(sequences, 1.0).values
    assert isinstance(with_column, Packed)
    np.testing.assert_array_equal(with_column.values, engine.logprobs(text, 1.0).values.values)
