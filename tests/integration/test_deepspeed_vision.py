"""Two ranks that train a vision-language model against one, also where one of them has no images."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.engines.base import EngineSpec
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Optimizer
from rlflow.resources.layout import Layout
from rlflow.resources.models.lora import Lora
from rlflow.resources.models.vision import TrainedParts
from tests.helpers import minibatch
from tests.integration.engine_process import EngineProcess
from tests.integration.test_deepspeed import Ranks, build_deepspeed, build_torch, plain
from tests.integration.test_fsdp import build_fsdp
from tests.unit.engines.vision.test_passes import build_case, vision_spec

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow
# The rows of the prompt without images.
TEXT = np.arange(3, 6)
LORA = Lora(rank=4)


def actor(kind: str, stage: int, train: TrainedParts, sequence_parallel_size: int, lora: Lora | None) -> EngineSpec:
    layout = Layout(
        micro_batch_tokens=2**20,
        zero_stage=stage,
        data_parallel_size=2 // sequence_parallel_size,
        sequence_parallel_size=sequence_parallel_size,
    )
    optimizer = Optimizer(learning_rate=1e-2)
    return replace(vision_spec(kind, "Trains", "Scores"), layout=layout, train=train, lora=lora, optimizer=optimizer)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("build", "kind", "stage", "train", "ulysses", "lora"),
    [
        (build_deepspeed, "idefics3", 2, "all", 1, None),
        (build_deepspeed, "qwen3_vl", 3, "all", 1, None),
        (build_deepspeed, "internvl", 3, "language", 1, None),
        (build_torch, "qwen3_vl", 0, "all", 2, None),
        (build_deepspeed, "qwen2_5_vl", 3, "all", 2, None),
        (build_fsdp, "qwen3_vl", 3, "language", 1, None),
        (build_fsdp, "internvl", 3, "language", 2, None),
        (build_fsdp, "internvl", 3, "language", 1, LORA),
        (build_fsdp, "qwen2_5_vl", 3, "language", 1, LORA),
    ],
)
def test_two_ranks_train_as_one(
    two: Sequence[EngineProcess],
    address: str,
    build: Callable[..., int],
    kind: str,
    stage: int,
    train: TrainedParts,
    ulysses: int,
    lora: Lora | None,
) -> None:
    """Without sequence parallelism, the second rank has text alone. Towers have layers named like adapted ones."""
    of, sequences = actor(kind, stage, train, ulysses, lora), build_case(kind).sequences
    ours, expected = Ranks(two, of, address, True, build), plain(True, of=replace(of, layout=vision_spec(kind).layout))
    images = np.setdiff1d(np.arange(len(sequences)), TEXT)
    shares: list[Any] = [np.arange(len(sequences))] * 2 if ulysses == 2 else [images, TEXT]
    for step in range(2):
        batch = minibatch(sequences, step)
        first, other = ours.update([batch.take(rows) for rows in shares], [LikelihoodLoss()] * 2)
        metrics = expected.update(batch, LikelihoodLoss()).values
        assert first == other
        assert first.values == pytest.approx(metrics, abs=2e-6)
    scores = ours.logprobs([sequences.take(rows) for rows in shares], [1.0] * 2)
    logprobs = expected.logprobs(sequences, 1.0).values
    for rows, rank in zip(shares, scores, strict=True):
        np.testing.assert_allclose(rank.values.values, logprobs.take(rows).values, atol=2e-6)
    weights = dict(expected.weights())
    for name, value in ours.weights()[0]:
        # Neighbouring numbers in float32 may be further apart than 1e-7.
        np.testing.assert_allclose(value, weights[name], rtol=2**-23, atol=1e-7, err_msg=name)
