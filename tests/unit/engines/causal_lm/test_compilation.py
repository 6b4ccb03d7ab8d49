"""Layers are compiled where that works and pays."""

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest

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


@pytest.mark.parametrize(
    ("zero_stage", "hidden_size", "pays"), [(None, 896, True), (2, 896, True), (3, 896, False), (None, 64, False)]
)
def test_small_models_and_gathered_weights_are_not_compiled(
    zero_stage: int | None, hidden_size: int, pays: bool
) -> None:
    given = replace(spec(), device="cuda", layout=Layout(micro_batch_tokens=64, zero_stage=zero_stage))
    assert pays_to_compile(given, hidden_size) == pays
