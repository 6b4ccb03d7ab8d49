"""vLLM with adapters against transformers: the same logprobs, whatever became of earlier weight syncs."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.engines.base import EngineSpec
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import EngineError, RecipeError
from rlflow.resources.models.lora import Lora
from tests.integration.engine_process import EngineProcess, RemoteEngine, processes
from tests.integration.test_vllm import (
    GIVEN,
    GREEDY,
    LAYOUTS,
    NUM_COPIES,
    NUM_FAILURES,
    SAMPLING,
    Weights,
    broken,
    check_weights,
    serving,
)

SHARED_PROCESSES = "vLLM"
pytestmark = pytest.mark.slow

# vLLM supports this rank only within the room of a larger one.
LORA = Lora(rank=5, alpha=10)


def with_adapters(**changes: Any) -> EngineSpec:
    return serving(lora=LORA, **changes)


@pytest.fixture(scope="module")
def process(vllm_process: EngineProcess) -> EngineProcess:
    return vllm_process


@pytest.fixture(scope="module")
def alone(process: EngineProcess) -> RemoteEngine:
    return process.build("vllm", with_adapters())


@pytest.fixture(scope="module")
def pair() -> Iterator[RemoteEngine]:
    with processes(1, "vllm") as (started,):
        yield started.build("vllm", with_adapters(layout=LAYOUTS["pair"]))


@pytest.fixture(scope="module")
def reference() -> TransformersEngine:
    return TransformersEngine(with_adapters())


@pytest.fixture(params=["alone", pytest.param("pair", marks=pytest.mark.soak)])
def engine(request: pytest.FixtureRequest) -> RemoteEngine:
    """Return an engine on one rank, and one that is tensor-parallel on two."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def new_adapters(seed: int) -> Weights:
    """Return adapters far from those before, so that an old one would show."""
    state = TransformersEngine(with_adapters())._model.state_dict()
    draw = torch.Generator().manual_seed(seed)
    shapes = {name.replace(".default", ""): weight.shape for name, weight in state.items() if ".lora_" in name}
    return [(f"base_model.model.{name}", torch.randn(shape, generator=draw) / 4) for name, shape in shapes.items()]


def test_before_the_first_copy_it_is_the_model_alone(process: EngineProcess) -> None:
    check_weights(process.build("vllm", with_adapters()), TransformersEngine(serving()), 0)


@NUM_COPIES
def test_after_each_copy_logprobs_are_those_of_the_new_adapters(
    engine: RemoteEngine, reference: TransformersEngine, copies: int
) -> None:
    """Drawn and likeliest tokens, with prompts longer than a block of keys and values, which stays from before."""
    texts = set()
    for version in range(1, copies + 1):
        weights = new_adapters(version)
        engine.load_weights(weights, version)
        reference.load_weights(weights, version)
        check_weights(engine, reference, version)
        texts.add(engine.generate(GIVEN, GREEDY).texts)
    assert len(texts) > copies / 2


@NUM_FAILURES
def test_a_copy_that_fails_midway_is_never_generated_from(
    engine: RemoteEngine, reference: TransformersEngine, failures: int
) -> None:
    draw = np.random.default_rng(0)
    for attempt in range(failures):
        bad, message = broken(new_adapters(1000 + attempt), attempt % 4, draw)
        with pytest.raises(EngineError, match=message):
            engine.load_weights(bad, 1000 + attempt)
        with pytest.raises(EngineError, match="it cannot generate: its weights are incomplete"):
            engine.generate(GIVEN, SAMPLING)
        if attempt % 3:  # else the next failure comes on top of this one
            weights = new_adapters(2000 + attempt)
            engine.load_weights(weights, attempt)
            reference.load_weights(weights, attempt)
            check_weights(engine, reference, attempt)


def load_unchecked(engines: list[Any], place: int, weights: Weights) -> None:
    """Load weights in the engine's process without rlflow's checks, so that vLLM meets those that do not fit."""
    engine = engines[place]
    expected, engine._expected = engine._expected, SimpleNamespace(check=lambda role, given: given)
    try:
        engine.load_weights(weights, 1)
    finally:
        engine._expected = expected


def test_a_copy_that_fails_inside_vllm(engine: RemoteEngine, reference: TransformersEngine) -> None:
    for attempt in range(3):
        (name, _), *others = new_adapters(3000 + attempt)
        engine._process.send(load_unchecked, engine._place, [(name, torch.zeros(3, 100)), *others])
        with pytest.raises(EngineError, match="role rollout: weight sync 1 failed"):
            engine._process.receive()
        with pytest.raises(EngineError, match="it cannot generate: its weights are incomplete"):
            engine.generate(GIVEN, SAMPLING)
        weights = new_adapters(4000 + attempt)
        engine.load_weights(weights, attempt)
        reference.load_weights(weights, attempt)
        check_weights(engine, reference, attempt)


def test_adapters_that_cannot_be_taken_over(process: EngineProcess) -> None:
    unknown = replace(with_adapters(), lora=Lora(target_modules=("qproj",)))
    with pytest.raises(RecipeError, match="it has no linear layers 'qproj'"):
        process.build("vllm", unknown)
