"""The memory of a pass over images, and the patches that a plan allows in one."""

from dataclasses import replace
from typing import Any

import pytest

import rlflow
from rlflow.errors import PlacementError
from rlflow.report.plan_text import describe_layout
from rlflow.resources.layout import Layout
from rlflow.resources.memory.images import encoding_bytes
from rlflow.resources.memory.state import MIXED_PRECISION
from rlflow.resources.models.vision import VisionTower
from tests.helpers import ARCHITECTURE, load

SIZES: dict[str, Any] = {"hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 4, "num_attention_heads": 1}
MODEL = replace(ARCHITECTURE, vision=VisionTower(model_type="qwen3_vl", patch_size=1, **SIZES))
LAYOUT = Layout(micro_batch_tokens=1, micro_batch_patches=10)


@pytest.mark.parametrize(
    ("trains", "checkpoints", "expected"),
    [(False, False, (360, 0)), (True, False, (360, 1440)), (True, True, (360, 160))],
)
def test_bytes_by_hand(trains: bool, checkpoints: bool, expected: tuple[int, int]) -> None:
    """A patch has 6 x 2 values around attention and 2 x 3 of the MLP, of two bytes each, or its 2 inputs, per layer."""
    training = replace(MIXED_PRECISION, trains_vision=trains)
    assert encoding_bytes(MODEL, replace(LAYOUT, gradient_checkpointing=checkpoints), training) == expected
    assert encoding_bytes(MODEL, replace(LAYOUT, micro_batch_patches=None), training) == (0, 0)


def test_a_pass_has_room_for_the_longest_prompt_and_the_expected_images() -> None:
    """Four patches are a token; half of each sequence is expected to be an image."""
    overrides = ["data.max_prompt_tokens=1000", "expect={prompt_tokens: 500, image_tokens: 400, response_tokens: 300}"]
    plan = rlflow.compile(load("recipe=grpo_internvl_8b", *overrides), "2x8")
    actor, reference = (plan.roles[role].layout for role in ("actor", "reference"))
    assert actor.micro_batch_patches == 4 * max(1000, actor.micro_batch_tokens // 2)
    assert reference.micro_batch_patches == 2 * reference.micro_batch_tokens
    assert f"{reference.micro_batch_tokens} tokens and {reference.micro_batch_patches} patches" in describe_layout(
        reference
    )


def test_a_trained_tower_takes_memory_and_what_does_not_apply_is_refused() -> None:
    pinned = ["gpus=8", "micro_batch_tokens=4096", "micro_batch_patches=40000", "gradient_checkpointing=false"]
    pins = [f"roles.actor.{pin}" for pin in (*pinned, "sequence_parallel_size=1")]
    frozen, trained = (
        rlflow.compile(load("recipe=grpo_internvl_8b", *pins, f"roles.actor.train={train}"), "2x8").prediction.memory
        for train in ("language", "all")
    )
    assert trained["actor"].phases["update"]["activations"] > frozen["actor"].phases["update"]["activations"]
    tensor_parallel = load("recipe=grpo_internvl_8b", "roles.actor.engine=fsdp", "roles.actor.tensor_parallel_size=2")
    with pytest.raises(PlacementError, match="2 GPUs cannot divide a model that sees images"):
        rlflow.compile(tensor_parallel, "2x8")
    with pytest.raises(PlacementError, match="micro_batch_patches: does not apply to this role"):
        rlflow.compile(load("recipe=grpo_7b", "roles.actor.micro_batch_patches=8"), "1x8")
