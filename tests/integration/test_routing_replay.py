"""Engines that train with the experts of the sampler, on two ranks against one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.engines.base import EngineSpec
from rlflow.recipe import Model
from tests.expert_models import random_routing, save_model
from tests.integration.engine_process import EngineProcess
from tests.integration.test_deepspeed import LOSS, Ranks, build_deepspeed, policy_minibatch
from tests.integration.test_fsdp import actor, build_fsdp, plain, shares
from tests.integration.test_fsdp_tensor import EVEN, wide

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return save_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", tokens=EVEN)


def with_layout(of: EngineSpec, **layout: Any) -> EngineSpec:
    return replace(of, layout=replace(of.layout, **layout))


@pytest.mark.parametrize(
    ("build", "of"),
    [
        (build_deepspeed, with_layout(actor(), num_replicas=None)),
        (build_fsdp, with_layout(actor(gradient_checkpointing=True, reduces_once=True), expert_parallel_size=2)),
        (build_fsdp, with_layout(actor(sequence=2), expert_parallel_size=2)),
        (build_fsdp, wide(gradient_checkpointing=True, expert_parallel_size=2)),
    ],
    ids=["deepspeed", "experts", "ulysses", "tensor"],
)
def test_ranks_train_as_one_does(
    two: Sequence[EngineProcess], address: str, model: Model, build: Callable[..., int], of: EngineSpec
) -> None:
    of = replace(of, model=model, routing_replay=True)
    ranks, expected = Ranks(two, of, address, build=build), plain(of)
    own_choice = plain(replace(of, routing_replay=False))
    for step in range(2):
        batch = policy_minibatch(step)
        batch = replace(batch, routing=random_routing(batch, num_layers=2, seed=step))
        parts = shares(of, batch)
        scores = [part.values.values for part in ranks.logprobs(parts, [1.0] * len(parts))]
        whole = np.concatenate(scores[:: of.layout.ranks_per_share])
        assert whole == pytest.approx(expected.logprobs(batch, 1.0).values.values, abs=1e-5)
        assert whole != pytest.approx(own_choice.logprobs(batch, 1.0).values.values, abs=1e-2)
        metrics = ranks.update(parts, [LOSS] * len(parts))[0].values
        same = expected.update(batch, LOSS).values
        assert metrics["loss"] == pytest.approx(same["loss"], abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-5)
        own_choice.update(batch, LOSS)
    weights = dict(expected.weights())
    for name, value in ranks.weights()[0]:
        assert float((value - weights[name]).abs().max()) <= 1e-5, name
