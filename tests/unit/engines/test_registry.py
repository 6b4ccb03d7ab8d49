"""The engines that a recipe may name, and what they declare."""

import pytest

from rlflow.engines.registry import engine_kind, engine_names


def test_every_name_is_that_of_an_engine() -> None:
    assert engine_names() == ["deepspeed", "fake", "fsdp", "torch", "transformers", "vllm"]


@pytest.mark.parametrize("name", engine_names())
def test_weights_travel_through_the_object_store_from_and_to_every_engine(name: str) -> None:
    kind = engine_kind(name)
    assert ("object_store" in kind.sends_weights_by) == ("Trains" in kind.capabilities)
    assert ("object_store" in kind.receives_weights_by) == ("Follows" in kind.capabilities)


def test_only_vllm_takes_weights_from_gpu_to_gpu() -> None:
    receivers = {name for name in engine_names() if engine_kind(name).receives_weights_by & {"ipc", "nccl"}}
    assert receivers == {"vllm"}
