"""The settings of DeepSpeed, and the memory that an offloaded engine releases."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlflow.engines.sharded.cpu_offload import OffloadedMemory
from rlflow.engines.sharded.settings import deepspeed_config
from rlflow.errors import RecipeError
from rlflow.resources.layout import Layout
from tests.helpers import MODEL, spec


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
def test_deepspeed_gets_the_layout(options: dict[str, Any], zero: dict[str, Any]) -> None:
    assert config(**options)["zero_optimization"] == zero | {"reduce_bucket_size": 200_000_000}


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
        "roles.actor.offload: 'weights' is not supported with ZeRO stage 2.\n  Fix: zero_stage 3."
    )


class TestParked:
    @pytest.fixture(autouse=True)
    def small_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlflow.engines.sharded.cpu_offload._CHUNK_BYTES", 64)

    def test_views_of_offloaded_tensors_are_restored(self) -> None:
        whole = torch.arange(50.0)
        other, empty = torch.arange(5, dtype=torch.int8), torch.empty(0)
        views = [whole[:20].view(4, 5), whole[30:], other, empty]
        before = [view.clone() for view in views]
        parked = OffloadedMemory(torch.device("cpu"))
        parked.offload(views)
        assert parked.num_bytes == 50 * 4 + 5
        assert {view.untyped_storage().nbytes() for view in views} == {0}
        parked.restore()
        assert all(torch.equal(view, same) for view, same in zip(views, before, strict=True))
        assert parked.num_bytes == 0

    def test_the_host_gives_chunks_of_one_size_that_serve_again(self) -> None:
        parked = OffloadedMemory(torch.device("cpu"))
        first, more = torch.arange(41.0), torch.arange(10.0)
        for tensors, count in (([first], 3), ([first, more], 4), ([more], 4)):
            before = [chunk.data_ptr() for chunk in parked._chunks]
            parked.offload(tensors)
            assert [chunk.data_ptr() for chunk in parked._chunks][: len(before)] == before
            assert [chunk.nbytes for chunk in parked._chunks] == [64] * count
            parked.restore()
        assert torch.equal(first, torch.arange(41.0))

    def test_what_one_has_put_away_another_leaves_alone(self) -> None:
        weights, state = torch.arange(6.0), torch.arange(9.0)
        view = weights[2:]
        first, second = OffloadedMemory(torch.device("cpu")), OffloadedMemory(torch.device("cpu"))
        first.offload([weights])
        second.offload([view, state])
        assert (first.num_bytes, second.num_bytes) == (24, 36)
        first.restore()
        assert torch.equal(weights, torch.arange(6.0))
        assert state.untyped_storage().nbytes() == 0
