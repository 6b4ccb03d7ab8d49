"""Layers are compiled where that works and pays."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlflow.engines.causal_lm import compilation
from rlflow.engines.causal_lm.compilation import can_compile, pays_to_compile
from rlflow.resources.layout import Layout
from tests.helpers import spec


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    can_compile.cache_clear()
    monkeypatch.setattr(compilation, "find_spec", lambda name: name)
    monkeypatch.setattr(compilation, "has_varlen_kernel", lambda dtype, device: True)
    monkeypatch.setattr(shutil, "which", lambda name: name == "gcc")
    for variable in ("CC", "TORCH_COMPILE_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    yield
    can_compile.cache_clear()


@pytest.mark.parametrize(
    ("device", "variable", "compilers", "can"),
    [
        ("cuda", "", ["gcc"], True),
        ("cuda", "", [], False),
        ("cuda", "CC", [], True),
        ("cuda", "TORCH_COMPILE_DISABLE", ["gcc"], False),
        ("cpu", "", ["gcc"], False),
    ],
)
def test_it_needs_a_gpu_and_a_compiler(
    monkeypatch: pytest.MonkeyPatch, device: str, variable: str, compilers: list[str], can: bool
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name in compilers)
    if variable:
        monkeypatch.setenv(variable, "1")
    assert can_compile(device) == can


def qwen(kind: str, hidden_size: int) -> Any:
    """Return a model without data."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 16}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize(
    ("kind", "hidden_size", "zero_stage", "pays"),
    [
        ("qwen2", 896, None, True),
        ("qwen2", 896, 2, True),
        ("qwen2", 896, 3, False),
        ("qwen2", 64, None, False),
        ("qwen3_moe", 896, None, False),
    ],
)
def test_small_models_gathered_weights_and_experts_are_not_compiled(
    kind: str, hidden_size: int, zero_stage: int | None, pays: bool
) -> None:
    given = replace(spec(), device="cuda", layout=Layout(micro_batch_tokens=64, zero_stage=zero_stage))
    assert pays_to_compile(given, qwen(kind, hidden_size)) == pays
