"""Adapters against the weights that they stand for."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlflow.engines.base import EngineSpec
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import EngineError, RecipeError
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Model, Optimizer
from rlflow.resources.models.lora import Lora, adapter_parameters
from tests.helpers import ARCHITECTURE, MODEL, minibatch, sequences, spec

LORA = Lora(rank=4, alpha=6)
GIVEN = sequences([3, 6, 2], [[4, 9, 1], [2, 7], [5]])


def actor(lora: Lora | None = LORA, **changes: Any) -> EngineSpec:
    of = spec(capabilities=["Trains", "Scores"], optimizer=Optimizer(learning_rate=1e-2), micro_batch_tokens=16)
    return replace(of, lora=lora, **changes)


def trained(of: EngineSpec | None = None, steps: int = 3) -> TorchEngine:
    engine = TorchEngine(of or actor())
    for step in range(steps):
        engine.update(minibatch(GIVEN, step=step), LikelihoodLoss())
    return engine


def logprobs(engine: Any) -> Any:
    return engine.logprobs(GIVEN, 1.0).values.values


def whole(engine: TorchEngine, scale: float = 6 / 4) -> Mapping[str, torch.Tensor]:
    """Return the weights of the engine's model with its adapters added, calculated in float64."""
    state = engine._model.state_dict()
    weights = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        layer, inside, _ = name.partition(".base_layer.weight")
        if inside:
            a, b = state[f"{layer}.lora_A.default.weight"], state[f"{layer}.lora_B.default.weight"]
            tensor = tensor.double() + scale * b.double() @ a.double()
        weights[name.replace(".base_layer", "")] = tensor.double()
    return weights


def test_new_adapters_leave_the_model_as_it_is() -> None:
    assert (logprobs(TorchEngine(actor())) == logprobs(TorchEngine(actor(lora=None)))).all()


@pytest.mark.slow
def test_without_them_it_is_the_model_that_it_was() -> None:
    """Reading the base model between two updates does not change them."""
    engine, plain = trained(), TorchEngine(actor(lora=None))
    assert (engine.base_logprobs(GIVEN, 1.0).values.values == logprobs(plain)).all()
    assert np.abs(logprobs(engine) - logprobs(plain)).max() > 0.01
    others = trained()
    for each in (engine, others):
        each.update(minibatch(GIVEN, step=3), LikelihoodLoss())
    assert (logprobs(engine) == logprobs(others)).all()


def test_only_adapters_are_trained() -> None:
    before, engine = TorchEngine(actor())._model.state_dict(), trained()
    for name, tensor in engine._model.state_dict().items():
        assert bool((tensor == before[name]).all()) == (".lora_" not in name), name
    with_gradients = [name for name, weight in engine._model.named_parameters() if weight.requires_grad]
    assert with_gradients
    assert all(".lora_" in name for name in with_gradients)
    assert len(engine._optimizer.state_dict()["state"]) == len(with_gradients)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_trained_in_float32_and_computed_in_the_type_of_the_model(dtype: Any) -> None:
    engine = trained(actor(model=replace(MODEL, dtype=dtype)))
    masters = engine._trained_weights()
    assert {master.dtype for master in masters.values()} == {torch.float32}
    for name, tensor in engine._model.named_parameters():
        assert tensor.dtype == getattr(torch, dtype), name
        assert (name in masters) == (".lora_" in name)
        assert name not in masters or tensor.equal(masters[name].to(tensor.dtype))


def test_gradients_are_those_of_the_weights_that_they_stand_for() -> None:
    """With W = W0 + s B A, the gradients are dL/dB = s dL/dW A' and dL/dA = s B' dL/dW."""
    engine, plain = trained(), TorchEngine(actor(lora=None))
    plain._model.load_state_dict(whole(engine))
    batch = minibatch(GIVEN)
    for each in (engine, plain):
        each._compute_gradients(batch, LikelihoodLoss())
    weights = dict(plain._model.named_parameters())
    adapters = {name: weight for name, weight in engine._model.named_parameters() if ".lora_A" in name}
    assert len(adapters) == 2 * 7
    for name, a in adapters.items():
        b = engine._model.get_parameter(name.replace("lora_A", "lora_B"))
        of_weight = weights[name.replace(".lora_A.default", "")].grad
        assert of_weight is not None
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, 6 / 4 * b.T @ of_weight, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(b.grad, 6 / 4 * of_weight @ a.T, atol=1e-6, rtol=1e-4)


def test_b_learns_as_fast_as_pefts_own_optimizer_lets_it() -> None:
    """Three steps of LoRA+ with a ratio of 16 against peft's, from the same gradients."""
    from peft.optimizers import create_loraplus_optimizer

    of = actor(replace(LORA, b_learning_rate=16.0))
    of = replace(of, optimizer=replace(of.optimizer, learning_rate=1e-3, max_grad_norm=1e9))
    engine, peer = TorchEngine(of), TorchEngine(of)
    options = {"betas": of.optimizer.betas, "weight_decay": of.optimizer.weight_decay, "eps": 1e-8}
    theirs = create_loraplus_optimizer(peer._model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, **options)
    for step in range(3):
        batch = minibatch(GIVEN, step=step)
        engine.update(batch, LikelihoodLoss())
        peer._compute_gradients(batch, LikelihoodLoss())
        theirs.step()
    weights = dict(peer._model.named_parameters())
    for name, weight in engine._trained_weights().items():
        torch.testing.assert_close(weight, weights[name], atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_checkpointing_changes_nothing() -> None:
    of = actor()
    engine = trained(replace(of, layout=replace(of.layout, gradient_checkpointing=True)))
    assert logprobs(engine) == pytest.approx(logprobs(trained()), abs=1e-6)


def test_a_follower_computes_the_same() -> None:
    leader, follower = trained(), TransformersEngine(replace(actor(), role="rollout"))
    follower.load_weights(leader.weights(), 1)
    assert logprobs(follower) == pytest.approx(logprobs(leader), abs=1e-6)
    lacking = [(name, weight) for name, weight in leader.weights() if "layers.1.mlp.up_proj.lora_B" not in name]
    with pytest.raises(
        EngineError, match=r"the weights lack 'base_model.model.model.layers.1.mlp.up_proj.lora_B.weight'"
    ):
        follower.load_weights(lacking, 2)


def test_nothing_but_adapters_is_on_its_way() -> None:
    """2 layers: q 16 -> 128, k and v 16 -> 64, o 128 -> 16, the MLP 16 -> 32 twice and back; rank 4, float32."""
    sent = sum(weight.nbytes for _, weight in trained().weights())
    assert sent == 4 * 4 * 2 * (2 * (16 + 128) + 2 * (16 + 64) + 3 * (16 + 32)) == 18944
    assert sent == 4 * adapter_parameters(ARCHITECTURE, LORA)
    everything = sum(weight.nbytes for _, weight in TorchEngine(actor(lora=None)).weights())
    assert everything == 4 * ARCHITECTURE.num_parameters


def test_some_layers_alone() -> None:
    engine = TorchEngine(actor(lora=Lora(rank=4, target_modules=("q_proj", "v_proj"))))
    layers = {name.split(".")[-3] for name, _ in engine.weights()}
    assert layers == {"q_proj", "v_proj"}


@pytest.mark.parametrize("names", [("qproj",), ("q_proj", "lm_head")])
def test_layers_that_are_not_there(names: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        TorchEngine(actor(lora=Lora(target_modules=names)))
    assert str(caught.value) == (
        f"models.policy: it has no linear layers '{names[-1]}', which lora.target_modules of a role names.\n"
        "  Known: all-linear, down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj.\n"
        "  Fix: use names from this list."
    )


@pytest.mark.slow
def test_a_checkpoint_has_adapters_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    engine, base = trained(), TorchEngine(actor())._model.state_dict()
    engine.save(tmp_path)
    assert set(load_file(tmp_path / "weights-00000-00000.safetensors")) == {name for name in base if ".lora_" in name}
    # The adapters of the checkpoint replace others.
    resumed = trained(steps=1)
    resumed.restore(tmp_path)
    for each in (engine, resumed):
        each.update(minibatch(GIVEN, step=3), LikelihoodLoss())
    for (name, one), (_, other) in zip(engine.weights(), resumed.weights(), strict=True):
        assert (one == other).all(), name


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "scale"), [(LORA, 6 / 4), (replace(LORA, rank_stabilized=True), 6 / 2)])
def test_it_exports_a_model_without_adapters_and_beside_it_peft_s(tmp_path: Path, lora: Lora, scale: float) -> None:
    from peft import PeftModel

    engine = trained(actor(lora=lora))
    engine.export(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in whole(engine, scale).items():
        torch.testing.assert_close(loaded.state_dict()[name].double(), weight, atol=1e-6, rtol=1e-6)
    exported = TransformersEngine(actor(lora=None, model=replace(MODEL, path=str(tmp_path), random_weights=False)))
    assert logprobs(exported) == pytest.approx(logprobs(engine), abs=1e-5)
    # peft itself reads what stands beside it.
    base = TransformersEngine(actor(lora=None))
    base._model = PeftModel.from_pretrained(base._model, tmp_path / "adapters").eval().base_model.model
    assert logprobs(base) == pytest.approx(logprobs(engine), abs=1e-6)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)


@pytest.mark.slow
def test_the_merged_model_computes_what_the_base_model_and_the_adapters_do(tmp_path: Path) -> None:
    """All are loaded by transformers and peft alone. The path of the base model is not in the adapters' files."""
    from peft import PeftModel

    TorchEngine(actor(lora=None)).export(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trained(actor(model=Model(path=str(tmp_path / "base"), dtype="float32"))).export(tmp_path / "trained")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    ids = torch.arange(12)[None]
    before = base(ids).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "trained", subfolder="adapters")(ids).logits
    torch.testing.assert_close(merged(ids).logits, adapted, atol=1e-5, rtol=0)
    assert (adapted - before).abs().max() > 0.01
    config = json.loads((tmp_path / "trained" / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None


def test_ranks_and_runs_begin_with_the_same_adapters() -> None:
    one, other = (dict(TorchEngine(actor()).weights()) for _ in range(2))
    assert all((one[name] == other[name]).all() for name in one)
    different = dict(TorchEngine(actor(seed=1)).weights())
    assert any(np.any((one[name] != different[name]).numpy()) for name in one if "lora_A" in name)
