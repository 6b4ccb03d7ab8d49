"""What DeepSpeed is told, and micro-batches in equal number."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.engines.sharded.rounds import evened
from rlflow.engines.sharded.settings import deepspeed_config
from rlflow.errors import RecipeError
from rlflow.resources.layout import Layout
from tests.helpers import MODEL, sequences, spec


def config(dtype: str = "float32", trains: bool = True, **layout: Any) -> dict[str, Any]:
    model = replace(MODEL, dtype=dtype)  # type: ignore[arg-type]
    return deepspeed_config(
        replace(spec(model=model), layout=Layout(micro_batch_tokens=64, **layout)),
        trains=trains,
    )


@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ({}, {"stage": 0}),
        ({"zero_stage": 2, "offload": "none"}, {"stage": 2}),
        ({"zero_stage": 2, "offload": "optimizer"}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        (
            {"zero_stage": 3, "offload": "weights"},
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        ),
        (
            {"zero_stage": 3, "offload": "weights", "trains": False},
            {"stage": 3, "offload_param": {"device": "cpu"}},
        ),
        ({"offload": "optimizer", "trains": False}, {"stage": 0}),
    ],
)
def test_the_layout_is_what_deepspeed_is_told(options: dict[str, Any], zero: dict[str, Any]) -> None:
    assert config(**options)["zero_optimization"] == zero


@pytest.mark.parametrize(
    ("dtype", "stage", "clips"), [("float32", 0, False), ("float32", 1, True), ("bfloat16", 0, True)]
)
def test_someone_clips(dtype: str, stage: int, clips: bool) -> None:
    given = config(dtype, zero_stage=stage)
    assert given["gradient_clipping"] == (1.0 if clips else 0.0)
    assert given["bf16"]["enabled"] == (dtype == "bfloat16")


def test_an_offload_that_the_stage_does_not_have() -> None:
    with pytest.raises(RecipeError) as raised:
        config(zero_stage=2, offload="weights")
    assert str(raised.value) == (
        "roles.actor.offload: 'weights' with ZeRO stage 2 is not possible.\n  Fix: zero_stage 3."
    )


@pytest.mark.parametrize(
    ("count", "pieces", "counting"),
    [
        (2, [[0, 1, 2], [3]], 2),
        (3, [[0, 1], [2], [3]], 3),
        (4, [[0], [1], [2], [3]], 4),
        (6, [[0], [1], [2], [3], [3], [3]], 4),
    ],
)
def test_as_many_micro_batches_as_the_other_ranks(count: int, pieces: list[list[int]], counting: int) -> None:
    given = sequences([2], [[2, 3, 7, 1]])
    ours, number = evened([np.arange(3), np.array([3])], given, count)
    assert [piece.tolist() for piece in ours] == pieces
    assert number == counting
