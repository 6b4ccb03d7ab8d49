"""Experts in parallel on ranks of the FSDP engine, against the plain engine on one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from rlflow.engines.base import EngineSpec
from rlflow.engines.serving.weights import ExpectedWeights
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import EngineError
from rlflow.recipe import Model
from rlflow.resources.models.lora import Lora
from tests.expert_models import models_in
from tests.integration.engine_process import EngineProcess, all_of, free_address, processes
from tests.integration.test_deepspeed import LOSS, of_path, policy_minibatch, split
from tests.integration.test_fsdp import MUON, actor, assert_equal_training, assert_same_weights, of_ranks, plain, shares

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow

EXPERTS = Lora(rank=4, experts=True, merge=True)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models_in(tmp_path_factory)


def with_experts(of: EngineSpec, model: Model, size: int) -> EngineSpec:
    return replace(of, model=model, layout=replace(of.layout, expert_parallel_size=size))


@pytest.mark.parametrize(
    ("name", "size", "of"),
    [
        ("qwen3_moe", 1, actor()),
        ("qwen3_moe", 2, actor(reduces_once=True, gradient_checkpointing=True)),
        ("qwen3_moe", 2, actor(sequence=2)),
        ("mixtral", 2, actor(reduces_once=True)),
        ("odd_mixtral", 1, actor()),
        ("deepseek_v3", 2, actor()),
        ("qwen3_moe", 2, replace(actor(), optimizer=MUON)),
        ("qwen3_moe", 2, replace(actor(), lora=Lora(rank=4, merge=True))),
        ("qwen3_moe", 1, replace(actor(gradient_checkpointing=True), lora=EXPERTS)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_they_train_as_on_one_rank(
    two: Sequence[EngineProcess], address: str, model_of: Any, name: str, size: int, of: EngineSpec
) -> None:
    of = with_experts(of, model_of(name), size)
    assert_equal_training(of_ranks(two, address, of), of)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_they_train_on_four_ranks_as_on_one(model_of: Any, name: str) -> None:
    """Each rank has all or a part of the shards of its experts, in one replica or in two."""
    with processes(4) as four:
        for size, replicas, sequence in ((4, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 1, 2)):
            of = actor(4, sequence=sequence, replicas=replicas, reduces_once=size == 2)
            of = with_experts(of, model_of(name), size)
            assert_equal_training(of_ranks(four, free_address(), of), of)


@pytest.mark.parametrize(("name", "size"), [("qwen3_moe", 2), ("odd_mixtral", 1)])
def test_checkpoints_and_exports_fit_any_number_of_ranks(
    two: Sequence[EngineProcess], address: str, model_of: Any, name: str, size: int, tmp_path: Path
) -> None:
    """The ranks have experts of their own, or a part of each."""
    of = with_experts(actor(), model_of(name), size)
    first, whole = of_ranks(two, address, of), of_ranks(two, address, with_experts(of, of.model, 1))
    alone = plain(of)
    first.update(split(policy_minibatch(0)), [LOSS] * 2)
    (tmp_path / "first").mkdir()
    first.save([tmp_path / "first"] * 2)
    whole.restore([tmp_path / "first"] * 2)
    alone.restore(tmp_path / "first")
    assert_same_weights(whole.weights()[0], first.weights()[0])
    assert_same_weights(list(alone.weights()), first.weights()[0])
    batch = policy_minibatch(1)
    alone.update(batch, LOSS)
    for ranks in (first, whole):
        ranks.update(shares(of, batch), [LOSS] * 2)
        assert_same_weights(ranks.weights()[0], list(alone.weights()), 1e-5)
    (tmp_path / "second").mkdir()
    alone.save(tmp_path / "second")
    first.restore([tmp_path / "second"] * 2)
    assert_same_weights(first.weights()[0], list(alone.weights()))
    first.export([tmp_path / "model"] * 2)
    again = plain(replace(of, model=of_path(tmp_path / "model")))
    assert_same_weights(list(again.weights()), list(alone.weights()))


def sliced_weights(engines: list[Any], place: int) -> list[tuple[str, torch.Tensor]]:
    with small_slices():
        return list(engines[place].weights())


@contextmanager
def small_slices() -> Iterator[None]:
    """Let a slice have at most 320 bytes: less than an expert, and five of 13 rows of the embeddings."""
    with patch("rlflow.engines.serving.weights.LARGEST_BYTES", 320), patch("rlflow.engines.fsdp.LARGEST_BYTES", 320):
        yield


@pytest.mark.parametrize(("name", "size"), [("qwen3_moe", 2), ("mixtral", 2), ("odd_mixtral", 1), ("deepseek_v3", 2)])
def test_large_layers_leave_in_slices(
    two: Sequence[EngineProcess], address: str, model_of: Any, name: str, size: int
) -> None:
    """Experts have the names and the values of the model's file, and the receiver misses none."""
    of = with_experts(actor(), replace(model_of(name), dtype="bfloat16"), size)
    sent = all_of(two, sliced_weights, of_ranks(two, address, of)._places)[0]
    file = load_file(Path(of.model.path or "") / "model.safetensors")
    experts = {weight for weight in file if ".experts." in weight}
    assert experts == {weight for weight, _ in sent if ".experts." in weight}
    expected = dict(plain(of).weights()) | file
    with small_slices():
        receiver = ExpectedWeights.of(AutoConfig.from_pretrained(of.model.path), of)
    received = dict(receiver.check("rollout", sent))
    for weight, value in received.items():
        assert torch.equal(value, expected[weight].bfloat16()), weight
    assert len(received) < len(sent)
    last = max(experts)
    with pytest.raises(EngineError, match=f"the weights lack '{last}'"):
        list(receiver.check("rollout", ((weight, value) for weight, value in sent if weight != last)))


def test_merged_experts_leave_in_slices(two: Sequence[EngineProcess], address: str, model_of: Any) -> None:
    of = replace(with_experts(actor(), model_of("qwen3_moe"), 1), lora=EXPERTS)
    ranks, alone = of_ranks(two, address, of), plain(of)
    batch = policy_minibatch(0)
    ranks.update(split(batch), [LOSS] * 2)
    alone.update(batch, LOSS)
    sent = all_of(two, sliced_weights, ranks._places)[0]
    follower = TransformersEngine(replace(of, role="rollout", lora=None))
    with small_slices():
        follower.load_weights(sent, 1)
    expected = alone.logprobs(batch, 1.0).values.values
    assert follower.logprobs(batch, 1.0).values.values == pytest.approx(expected, abs=1e-5)


def test_experts_that_cannot_be_divided(two: Sequence[EngineProcess], address: str, model_of: Any) -> None:
    with pytest.raises(EngineError, match="ranks of a replica cannot be divided into groups of 2 for experts"):
        of_ranks(two, address, with_experts(actor(replicas=2), model_of("qwen3_moe"), 2))
