"""Roles that ask for deterministic operations."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlflow
from rlflow.engines.causal_lm.attention import VarlenSegments, flash_varlen_attention
from rlflow.engines.causal_lm.packing import pack
from rlflow.engines.torch import TorchEngine
from rlflow.errors import PlacementError
from tests.helpers import load, sequences, spec


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_gets_the_deterministic_option(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    """flash-attn takes an argument; torch's own kernel asks torch, and only where that does more than warn."""
    told: list[bool] = []

    def varlen(*given: Any, deterministic: bool = False, **options: Any) -> torch.Tensor:
        told.append(deterministic)
        result: torch.Tensor = given[0]
        return result

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen))
    TorchEngine(replace(spec(), deterministic=deterministic))
    given = sequences([3], [[1]])
    segments = pack(given.prompt_ids, given.response_ids).segments
    rows = torch.zeros(3, 2, 8)
    flash_varlen_attention(rows, rows, rows, VarlenSegments(segments, torch.device("cpu")), 1.0)
    assert told == [deterministic]
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.slow
def test_it_is_an_option_of_roles_that_train_and_no_other_experiment() -> None:
    usual = rlflow.compile(load("recipe=grpo_7b"), "2x8")
    asked = rlflow.compile(load("recipe=grpo_7b", "roles.actor.deterministic=true"), "2x8")
    assert asked.recipe.roles["actor"].deterministic
    assert asked.fingerprint == usual.fingerprint
    with pytest.raises(PlacementError) as raised:
        rlflow.compile(load("recipe=grpo_7b", "roles.rollout.deterministic=true"), "2x8")
    assert str(raised.value) == (
        "roles.rollout.deterministic: does not apply to this role with engine 'vllm'.\n"
        "  Free: 16 GPUs.\n"
        "  Fix: roles.rollout.deterministic=false."
    )
