"""The check that engines with the same weights have the same logprobs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rlflow
from rlflow.batch import Metrics, Repeated
from rlflow.batch.images import pack_images
from rlflow.errors import EngineError
from rlflow.runtime.agreement import check_sampler
from tests.helpers import load, rollouts, sequences

SEQUENCES = sequences([2], [[3, 1]])


def check(difference: float, version: int = 4, name: str = "update", overrides: tuple[str, ...] = ()) -> None:
    plan = rlflow.compile(load("recipe=grpo_tiny", "models.policy.dtype=float32", *overrides), "1x1@cpu")
    sampled = rollouts(SEQUENCES)
    lengths = sampled.response_ids.lengths
    versions = Repeated(np.array([4, version], np.int32), lengths)
    edges: dict[str, Any] = dict.fromkeys(("advantages", "reference"), None)
    edges["rollouts"] = replace(sampled, versions=versions, images=pack_images([()] * 2))
    check_sampler(plan, name, Metrics(values={"sampler_difference": difference}), edges, step=4)


def test_engines_with_the_same_weights_must_agree() -> None:
    check(0.0099)
    with pytest.raises(EngineError) as caught:
        check(0.25)
    assert str(caught.value) == (
        "update/sampler_difference: expected at most 0.01 in float32, got 0.25. The roles rollout and actor have the "
        "same weights (version 4 of models.policy) and other logprobs of the same tokens.\n"
        "  Causes: images that one of the engines processes differently, or encodings of older weights that it keeps; "
        "a weight sync that leaves weights out, or a model that one of the engines reads differently.\n"
        "  Fix: compare with roles.rollout.engine=transformers, which computes the model as actor does."
    )


def test_other_weights_and_rounding_may_differ() -> None:
    """One token is of an older version; bfloat16 rounds; and a second update of a role follows the first."""
    check(0.25, version=3)
    check(0.25, overrides=("models.policy.dtype=bfloat16",))
    second = "+graph.update_again={node: policy_update, role: actor, rollouts: rollouts, advantages: advantages}"
    check(0.25, name="update_again", overrides=(second,))
