"""The engines that a recipe may name."""

from rlflow.engines.registry import engine_class, engine_names


def test_every_name_is_that_of_an_engine() -> None:
    assert engine_names() == ["deepspeed", "fake", "torch", "transformers", "vllm"]
    assert all(engine_class(name).concurrent in (False, True) for name in engine_names())
