"""Adapters on two ranks of DeepSpeed against the plain engine on one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.engines.base import EngineSpec
from rlflow.engines.torch import TorchEngine
from rlflow.recipe import Optimizer
from rlflow.resources.models.lora import Lora
from tests.expert_models import save_model
from tests.helpers import ARCHITECTURE, MODEL, spec
from tests.integration.engine_process import EngineProcess, all_of, call, free_address
from tests.integration.test_deepspeed import (
    LOSS,
    Ranks,
    build_torch,
    compare_training,
    of_path,
    plain,
    policy_minibatch,
    saved_values,
    split,
)
from tests.integration.test_deepspeed import actor as full

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow

LORA = Lora(rank=4, alpha=6, b_learning_rate=4.0)


def actor(stage: int, **options: Any) -> EngineSpec:
    return replace(full(stage, **options), lora=LORA)


def expected(sgd: bool = False) -> TorchEngine:
    return plain(sgd, of=replace(spec(optimizer=Optimizer(learning_rate=1e-2)), lora=LORA))


@pytest.mark.parametrize(("stage", "sgd"), [(2, True), (3, False)])
def test_it_trains_as_the_plain_engine_does(two: Sequence[EngineProcess], address: str, stage: int, sgd: bool) -> None:
    of = actor(stage, gradient_checkpointing=stage == 3)
    compare_training(Ranks(two, of, address, sgd), expected(sgd), sgd, split)


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_of_experts(two: Sequence[EngineProcess], address: str, stage: int, tmp_path: Path) -> None:
    """The weights that are compared are those of the merged model."""
    lora, model = Lora(rank=4, experts=True, merge=True), save_model(tmp_path, "qwen3_moe")
    of = replace(actor(stage), lora=lora, model=model)
    exact = plain(True, of=replace(spec(optimizer=Optimizer(learning_rate=1e-2)), lora=lora, model=model))
    compare_training(Ranks(two, of, address, True), exact, True, split)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_model_without_them_between_updates(two: Sequence[EngineProcess], address: str, stage: int) -> None:
    ours, exact, base = Ranks(two, actor(stage), address, True), expected(True), plain()
    for step in range(3):
        batch = policy_minibatch(step)
        for method, peer in (("base_logprobs", base.logprobs), ("logprobs", exact.logprobs)):
            scores = [part.values.values for part in getattr(ours, method)(split(batch), [0.9] * 2)]
            assert np.concatenate(scores) == pytest.approx(peer(batch, 0.9).values.values, abs=1e-6)
        metrics = ours.update(split(batch), [LOSS] * 2)[0].values
        assert metrics == pytest.approx(exact.update(batch, LOSS).values, abs=1e-5)


@pytest.mark.parametrize(("build", "stage"), [(build_torch, 0), (None, 3)])
def test_ranks_that_share_their_tokens(two: Sequence[EngineProcess], address: str, build: Any, stage: int) -> None:
    of = actor(stage, sequence_parallel_size=2)
    ours = Ranks(two, of, address, True, **({"build": build} if build else {}))
    compare_training(ours, expected(True), True, lambda batch: [batch] * 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_it_goes_on_from_adapters_and_optimizer_alone(
    two: Sequence[EngineProcess], address: str, stage: int, tmp_path: Path
) -> None:
    one, other = (Ranks(two, actor(stage), address) for _ in range(2))
    one.update(split(policy_minibatch(0)), [LOSS] * 2)
    one.save([tmp_path] * 2)
    other.restore([tmp_path] * 2)
    assert {".lora_" in name for name in saved_values(tmp_path)} == {True}
    for step in (1, 2):
        batch = split(policy_minibatch(step))
        assert one.update(batch, [LOSS] * 2) == other.update(batch, [LOSS] * 2)
    for (name, value), (_, same) in zip(one.weights()[0], other.weights()[0], strict=True):
        assert (value == same).all(), name


@pytest.mark.parametrize("stages", [(1, 3), (3, 1)])
def test_another_number_of_ranks_and_another_zero_stage_go_on_from_it(
    two: Sequence[EngineProcess], single: Sequence[EngineProcess], address: str, stages: tuple[int, int], tmp_path: Path
) -> None:
    one = Ranks(two, actor(stages[0]), address)
    one.update(split(policy_minibatch(0)), [LOSS] * 2)
    one.save([tmp_path] * 2)
    alone = actor(stages[1])
    alone = replace(alone, layout=replace(alone.layout, data_parallel_size=1))
    other = Ranks(single, alone, free_address())
    other.restore([tmp_path])
    for (name, value), (_, same) in zip(one.weights()[0], other.weights()[0], strict=True):
        assert (value == same).all(), name
    batch = policy_minibatch(1)
    after = one.update(split(batch), [LOSS] * 2)[0].values
    assert other.update([batch], [LOSS])[0].values == pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_of_a_folder_is_exported_without_adapters(
    two: Sequence[EngineProcess], address: str, stage: int, tmp_path: Path
) -> None:
    tied = replace(MODEL, architecture=replace(ARCHITECTURE, tie_word_embeddings=True))
    plain(model=tied).export(tmp_path / "first")
    ours = Ranks(two, replace(actor(stage), model=of_path(tmp_path / "first")), address)
    ours.update(split(policy_minibatch(0)), [LOSS] * 2)
    ours.export([tmp_path / "second"] * 2)
    batch = policy_minibatch(1)
    scores = [part.values.values for part in ours.logprobs(split(batch), [0.9] * 2)]
    again = plain(model=of_path(tmp_path / "second"))
    assert again.logprobs(batch, 0.9).values.values == pytest.approx(np.concatenate(scores), abs=1e-6)
    assert (tmp_path / "second" / "adapters" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_bfloat16_has_masters_of_adapters_in_float32(two: Sequence[EngineProcess], address: str, stage: int) -> None:
    of = replace(actor(stage), model=replace(MODEL, dtype="bfloat16"))
    ours = Ranks(two, of, address)
    exact = expected()
    for step in range(5):
        batch = policy_minibatch(step)
        metrics = ours.update(split(batch), [LOSS] * 2)[0].values
        assert metrics["loss"] == pytest.approx(exact.update(batch, LOSS).values["loss"], abs=0.05)
    assert len(call_all(two, ours)) == len(dict(exact.weights()))


def call_all(two: Sequence[EngineProcess], ours: Ranks) -> dict[str, Any]:
    return dict(all_of(two, call, ours._places, ["weights"] * 2)[0])
