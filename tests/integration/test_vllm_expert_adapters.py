"""Merged adapters of a model with experts in vLLM, against transformers, which runs them beside the model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.engines.base import EngineSpec
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.recipe import Optimizer
from rlflow.resources.models.lora import Lora
from tests.expert_models import save_model
from tests.integration.engine_process import EngineProcess, RemoteEngine, processes
from tests.integration.test_vllm import TOLERANCE, difference, serving
from tests.integration.test_vllm_routing import SAMPLING, given

pytestmark = pytest.mark.slow

LORA = Lora(rank=5, alpha=10)


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    """Return a process of its own: vLLM makes groups for experts only in one whose first model has some."""
    with processes(1, "vllm") as (started,):
        yield started


@pytest.fixture
def of(tmp_path: Path) -> EngineSpec:
    return serving(model=save_model(tmp_path, "qwen3_moe", head_dim=32), max_model_len=64)


def trained(of: EngineSpec) -> TorchEngine:
    """Return an engine whose adapters are far from zero."""
    engine = TorchEngine(replace(of, role="actor", capabilities=frozenset({"Trains", "Scores"}), optimizer=Optimizer()))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in engine._trained_weights().values():
            weight.copy_(torch.randn(weight.shape, generator=draw) / 4)
    return engine


def copies(engine: TorchEngine) -> list[tuple[str, Any]]:
    return [(name, weight.detach().clone()) for name, weight in engine.weights()]


def check(engine: RemoteEngine, reference: TransformersEngine) -> None:
    for sampling in (SAMPLING, replace(SAMPLING, temperature=0.0, group_size=1)):
        assert difference(reference, engine.generate(given(), sampling)) < TOLERANCE


@pytest.mark.parametrize("experts", [False, True])
def test_the_merged_model(process: EngineProcess, of: EngineSpec, experts: bool) -> None:
    weights = copies(trained(replace(of, lora=replace(LORA, experts=experts, merge=True))))
    unmerged = replace(of, lora=replace(LORA, experts=experts))
    engine, reference = process.build("vllm", of), TransformersEngine(unmerged)
    engine.load_weights(weights, 1)
    reference.load_weights(copies(trained(unmerged)), 1)
    check(engine, reference)
