"""Adapters of models with experts, and of the experts, against the weights that they stand for."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow.engines.base import EngineSpec
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import RecipeError
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Model, Optimizer
from rlflow.resources.models.config import read_architecture
from rlflow.resources.models.lora import Lora, adapter_parameters, adapter_tensors
from tests.expert_models import NUM_EXPERTS, models_in
from tests.helpers import minibatch, sequences, spec

ATTENTION = Lora(rank=4, alpha=6)
EXPERTS = replace(ATTENTION, experts=True)
SCALE = 6 / 4
# peft nests the adapted layer of the first of a layer's weights in that of the second.
INNER = {"gate_up_proj": ".base_layer", "down_proj": ""}
GIVEN = sequences([3, 6, 2], [[4, 9, 1], [2, 7], [5]])


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models_in(tmp_path_factory)


def actor(model: Model, lora: Lora | None) -> EngineSpec:
    of = spec(capabilities=["Trains", "Scores"], optimizer=Optimizer(learning_rate=1e-2), micro_batch_tokens=16)
    return replace(of, model=model, lora=lora, routing_replay=False)


def trained(of: EngineSpec, steps: int = 3) -> TorchEngine:
    engine = TorchEngine(of)
    for step in range(steps):
        engine.update(minibatch(GIVEN, step=step), LikelihoodLoss())
    return engine


def logprobs(engine: Any) -> Any:
    return engine.logprobs(GIVEN, 1.0).values.values


def parts(state: Mapping[str, torch.Tensor], layer: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return A [rank, inputs] and B [outputs, rank] of each expert, as peft lays them out."""
    a, b = (state[f"{layer}.lora_{factor}.default.weight"].double() for factor in "AB")
    rank = len(a) // NUM_EXPERTS
    return [(a[expert * rank : (expert + 1) * rank], b[:, expert::NUM_EXPERTS]) for expert in range(NUM_EXPERTS)]


def whole(engine: TorchEngine) -> Mapping[str, torch.Tensor]:
    """Return the weights of the engine's model with its adapters added, expert by expert in float64."""
    state = engine._model.state_dict()
    weights = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        bare, value = name.replace(".base_layer", ""), tensor.double()
        layer, kind = bare.rpartition(".")[::2]
        if kind in INNER and bare != name:
            pairs = parts(state, layer + INNER[kind])
            value = torch.stack([w + SCALE * b @ a for w, (a, b) in zip(value, pairs, strict=True)])
        elif bare != name:
            a, b = (state[f"{layer}.lora_{factor}.default.weight"].double() for factor in "AB")
            value = value + SCALE * b @ a
        weights[bare] = value
    return weights


def test_linear_layers_alone_get_adapters(model_of: Any) -> None:
    """Attention has them; routers and experts, which are no linear layers, do not."""
    of = actor(model_of("qwen3_moe"), ATTENTION)
    assert (logprobs(TorchEngine(of)) == logprobs(TorchEngine(replace(of, lora=None)))).all()
    engine = trained(of)
    assert {name.split(".")[-3] for name, _ in engine.weights()} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    follower = TransformersEngine(replace(of, role="rollout"))
    follower.load_weights(engine.weights(), 1)
    assert logprobs(follower) == pytest.approx(logprobs(engine), abs=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_train_as_the_weights_that_their_adapters_stand_for(model_of: Any, name: str) -> None:
    """With W = W0 + s B A for each expert, the gradients are dL/dB = s dL/dW A' and dL/dA = s B' dL/dW."""
    of = actor(model_of(name), EXPERTS)
    plain = TorchEngine(replace(of, lora=None))
    assert logprobs(TorchEngine(of)) == pytest.approx(logprobs(plain), abs=1e-6)
    engine = trained(of)
    plain._model.load_state_dict(whole(engine))
    assert logprobs(engine) == pytest.approx(logprobs(plain), abs=1e-5)
    for each in (engine, plain):
        each._compute_gradients(minibatch(GIVEN), LikelihoodLoss())
    state = {name: weight.detach() for name, weight in engine._model.named_parameters()}
    gradients = {name: weight.grad for name, weight in engine._model.named_parameters() if weight.grad is not None}
    assert all(".lora_" in name for name in gradients)
    weights = dict(plain._model.named_parameters())
    layers = [name.removesuffix(".gate_up_proj") for name in weights if name.endswith("experts.gate_up_proj")]
    assert layers
    for layer in layers:
        for kind, inner in INNER.items():
            adapted = layer + inner
            of_weight = weights[f"{layer}.{kind}"].grad
            assert of_weight is not None
            pairs, found = parts(state, adapted), parts(gradients, adapted)
            for (a, b), (grad_a, grad_b), grad in zip(pairs, found, of_weight.double(), strict=True):
                torch.testing.assert_close(grad_b, SCALE * grad @ a.T, atol=1e-6, rtol=1e-4)
                torch.testing.assert_close(grad_a, SCALE * b.T @ grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("lora", [ATTENTION, EXPERTS], ids=["attention", "experts"])
def test_engines_can_get_the_merged_model(model_of: Any, lora: Lora) -> None:
    of = actor(model_of("qwen3_moe"), replace(lora, merge=True))
    engine = trained(of)
    sent = dict(engine.weights())
    expected = whole(engine)
    assert sent.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(sent[name].double(), weight, atol=1e-6, rtol=1e-6)
    follower = TransformersEngine(replace(of, role="rollout", lora=None))
    follower.load_weights(engine.weights(), 1)
    assert logprobs(follower) == pytest.approx(logprobs(engine), abs=1e-5)
    assert np.abs(logprobs(follower) - logprobs(TorchEngine(of))).max() > 0.01


def test_engines_of_transformers_can_get_adapters_of_experts(model_of: Any) -> None:
    of = actor(model_of("qwen3_moe"), EXPERTS)
    engine, follower = trained(of), TransformersEngine(replace(of, role="rollout"))
    follower.load_weights(engine.weights(), 1)
    assert logprobs(follower) == pytest.approx(logprobs(engine), abs=1e-6)
    architecture = read_architecture(str(of.model.path), "models.policy.path")
    assert architecture is not None
    assert sum(weight.numel() for _, weight in engine.weights()) == adapter_parameters(architecture, EXPERTS)
    assert len(list(engine.weights())) == adapter_tensors(architecture, EXPERTS)
    before = TorchEngine(replace(of, lora=None))
    assert logprobs(before) == pytest.approx(engine.base_logprobs(GIVEN, 1.0).values.values, abs=1e-6)


def test_peft_reads_adapters_of_experts(model_of: Any, tmp_path: Path) -> None:
    """The merged model and the base model with the adapters are loaded by transformers and peft alone."""
    from peft import PeftModel

    model = model_of("qwen3_moe")
    trained(actor(model, EXPERTS)).export(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model.path)
    ids = torch.arange(12)[None]
    before = base(ids).logits
    adapted = PeftModel.from_pretrained(base, tmp_path, subfolder="adapters")(ids).logits
    torch.testing.assert_close(merged(ids).logits, adapted, atol=1e-5, rtol=0)
    assert (adapted - before).abs().max() > 0.01
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]


def test_a_model_without_experts() -> None:
    of = replace(spec(capabilities=["Trains", "Scores"], optimizer=Optimizer()), lora=EXPERTS)
    with pytest.raises(RecipeError) as caught:
        TorchEngine(of)
    assert str(caught.value) == (
        "models.policy: it has no experts, for which lora.experts of a role asks for adapters.\n"
        "  Fix: roles.actor.lora.experts=false."
    )
