"""Experts in parallel to vLLM in slices: trainer and vLLM agree on logprobs before and after an update."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Packed, Prompts, Rollouts, Sequences
from rlflow.engines.base import Sampling
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Model
from rlflow.resources.layout import Layout
from tests.expert_models import save_model
from tests.helpers import keys, minibatch, spec
from tests.integration.engine_process import EngineProcess, all_of, build, free_address, processes
from tests.integration.test_fsdp import actor, of_ranks
from tests.integration.test_fsdp_experts import sliced_weights, small_slices, with_experts

SHARED_PROCESSES = "vLLM and FSDP with experts"
pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_tokens=8, group_size=2)
# Both compute in float32 with the same experts, and only the orders of their sums differ.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def trainers() -> Iterator[Sequence[EngineProcess]]:
    with processes(2) as started:
        yield started


def build_sliced(engines: list[Any], of: Any) -> int:
    """Build a vLLM engine that takes the experts of all layers in slices."""
    with small_slices():
        return build(engines, "vllm", of)


def given() -> Prompts:
    draw = np.random.default_rng(0)
    ids = [draw.integers(1, 13, length) for length in (40, 36, 5, 9)]
    return Prompts(keys=keys(4), ids=Packed.from_rows(ids, np.int32), rows=({},) * 4)


@pytest.mark.parametrize(("size", "experts"), [(1, 1), (2, 1), (2, 2)])
def test_vllm_follows_experts_that_arrive_in_slices(
    trainers: Sequence[EngineProcess], size: int, experts: int, tmp_path: Path
) -> None:
    """vLLM's ranks have a part of each expert, or experts of their own; whole tensors follow the slices."""
    model: Model = save_model(tmp_path, "qwen3_moe", head_dim=32)
    of = with_experts(actor(), model, 2)
    of = replace(of, optimizer=replace(of.optimizer, learning_rate=1e-2))
    trained = of_ranks(trainers, free_address(), of)
    layout = Layout(micro_batch_tokens=1, tensor_parallel_size=size, expert_parallel_size=experts)
    serving = replace(spec("rollout", model=model), layout=layout, max_model_len=64, max_num_seqs=8)
    with processes(1, "vllm") as (vllm,):
        vllm.send(build_sliced, serving)
        place = vllm.receive()

        def generate() -> Rollouts:
            vllm.send(_generate, place)
            rollouts: Rollouts = vllm.receive()
            return rollouts

        def difference(rollouts: Rollouts) -> float:
            parts = [rollouts.take(np.arange(len(rollouts))[rank::2]) for rank in range(2)]
            scores = trained.logprobs(parts, [1.0] * 2)
            pairs = zip(scores, parts, strict=True)
            return max(float(np.abs(score.values.values - part.logprobs.values).max()) for score, part in pairs)

        before = generate()
        assert difference(before) < TOLERANCE
        batch = minibatch(Sequences(keys=before.keys, prompt_ids=before.prompt_ids, response_ids=before.response_ids))
        for is_sliced in (True, False):
            trained.update([batch, batch], [LikelihoodLoss()] * 2)
            assert difference(before) > 100 * TOLERANCE
            sent = all_of(trainers, sliced_weights, trained._places)[0] if is_sliced else trained.weights()[0]
            # Two layers of eight experts have three matrices each, of which a whole tensor has one or two.
            assert sum(".experts." in weight for weight, _ in sent) == 2 * (8 * 3 if is_sliced else 2)
            vllm.send(_load, place, sent)
            vllm.receive()
            assert difference(generate()) < TOLERANCE


def _generate(engines: list[Any], place: int) -> Rollouts:
    rollouts: Rollouts = engines[place].generate(given(), SAMPLING)
    return rollouts


def _load(engines: list[Any], place: int, weights: Any) -> None:
    engines[place].load_weights(weights, 1)
