"""A run with two ranks of FSDP on simulated hosts, against one with a single rank of torch."""

import json
from pathlib import Path

import pytest

from tests.conftest import Typed

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]

TORCH = ["recipe=grpo_tiny", "cluster=1x1@cpu", "steps=6"]
FSDP = [f"roles.{role}.{pin}" for role in ("actor", "reference") for pin in ("engine=fsdp", "data_parallel_size=2")]


def test_it_learns_as_a_single_rank_does(typed: Typed, tmp_path: Path) -> None:
    curves = []
    for name, arguments in (("torch", TORCH), ("fsdp", [*TORCH, "cluster=1x3@cpu", *FSDP])):
        code, out, errors = typed(*arguments, f"hydra.run.dir={tmp_path / name}")
        assert code == 0, out + errors
        steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        names = ("update/loss", "update/grad_norm", "update/kl", "rewards/mean")
        curves.append([[step[name] for name in names] for step in steps if "update/loss" in step])
    one, two = curves
    assert len(one) == 6
    for alone, shared in zip(one, two, strict=True):
        assert shared == pytest.approx(alone, abs=1e-4)
