"""GSPO with a bfloat16 policy: engines with other kernels round differently, by more than its bounds are wide."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import rlflow
from rlflow.batch import Packed, Prompts, Repeated, RolloutAdvantages, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.nodes.policy_variants import GspoUpdate
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.helpers import MODEL, load, spec

Dtype = Literal["float32", "bfloat16"]


def sharpened(dtype: Dtype) -> TorchEngine:
    """Return a policy that prefers some tokens, like one that has learned."""
    engine = TorchEngine(spec(model=replace(MODEL, dtype=dtype), capabilities=["Trains"]))
    for weight in engine._model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(8)
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_is_scored_as_it_was_sampled_or_the_difference_is_told_apart(dtype: Dtype) -> None:
    """Before the first optimizer step the policy has not moved, so nothing is to be clipped."""
    sampler = TransformersEngine(spec("rollout", model=replace(MODEL, dtype=dtype), capabilities=["Generates"]))
    sampler.load_weights(sharpened(dtype).weights(), 1)
    keys = np.stack([np.zeros(32, np.int64), np.arange(32), np.zeros(32, np.int64)], 1)
    ids = Packed.from_rows([[1 + number % 10, 2, 3] for number in range(32)], np.int32)
    rollouts = sampler.generate(Prompts(keys=keys, ids=ids, rows=({},) * 32), Sampling(max_tokens=8, group_size=2))
    noise = np.random.default_rng(0).normal(0, 0.02, len(rollouts.logprobs.values)).astype(np.float32)
    by_other_kernels = replace(rollouts, logprobs=rollouts.logprobs.like(rollouts.logprobs.values + noise))
    signs = np.tile(np.array([1, -1], np.float32), 32)
    advantages = RolloutAdvantages(values=Repeated(signs, rollouts.response_ids.lengths))

    def clipped(rollouts: Rollouts, *, told_apart: bool) -> tuple[float, float]:
        trainer = sharpened(dtype)
        old = trainer.logprobs(rollouts, 1.0) if told_apart else None
        metrics = GspoUpdate().run(trainer, rollouts, advantages, old_logprobs=old).values
        return metrics["clip_fraction_positive"], metrics["clip_fraction_negative"]

    # In bfloat16 some CPUs have kernels for one token that round otherwise than those for many.
    if dtype == "float32":
        assert clipped(rollouts, told_apart=False) == (0, 0)
    assert clipped(by_other_kernels, told_apart=True) == (0, 0)
    assert min(clipped(by_other_kernels, told_apart=False)) > 0.25


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_gspo_learns_in_bfloat16(tmp_path: Path) -> None:
    """The recipe as it is, and without the node that tells the engines' difference apart."""
    figures: dict[tuple[str, ...], float | None] = {}
    for overrides in ((), ("~graph.old_logprobs",)):
        recipe = load("recipe=gspo_tiny", "models.policy.dtype=bfloat16", *overrides)
        report = run(rlflow.compile(recipe, "local"), tmp_path / str(len(figures)), LocalRuntime())
        figures[overrides] = report.eval_after
    with_node, without = figures.values()
    assert with_node is not None
    assert without is not None
    assert with_node >= 0.88
    assert with_node > without
