"""The cluster of a recipe for which none is named: the GPUs of this machine, as nvidia-smi would list them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rlflow
from rlflow.errors import RecipeError
from rlflow.runtime.ray.cluster.free_gpus import default_cluster, detect_cluster
from tests.helpers import load


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has nvidia-smi list GPUs of the given names."""

    def listed(*names: str) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        lines = "\n".join(f"echo 'GPU {index}: {name} (UUID: GPU-{index})'" for index, name in enumerate(names))
        tool.write_text(f"#!/bin/sh\n{lines}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # no Ray of the machine's
        monkeypatch.delenv("RAY_ADDRESS", raising=False)

    return listed


def nobody(reason: str) -> None:
    raise AssertionError(reason)


def test_gpus_that_are_seen_are_planned_for(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus("NVIDIA H200", "NVIDIA H200", "NVIDIA H200")
    assert default_cluster(nobody).shape == "1x3@h200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert default_cluster(nobody).shape == "1x2@h200"
    assert rlflow.compile(load("recipe=grpo_7b")).cluster.shape == "1x2@h200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert default_cluster(nobody).shape == "1x1@cpu"


def test_gpus_without_figures_leave_the_cpu(gpus: Callable[..., None]) -> None:
    gpus("NVIDIA Unheard-of")
    told: list[str] = []
    assert default_cluster(told.append).shape == "1x1@cpu"
    assert "the GPU 'NVIDIA Unheard-of' of" in told[0]
    with pytest.raises(RecipeError, match="the GPU 'NVIDIA Unheard-of' of"):
        detect_cluster()  # as asked for by cluster=auto


@pytest.mark.slow
def test_looking_imports_neither_torch_nor_ray(gpus: Callable[..., None], tmp_path: Path) -> None:
    gpus("NVIDIA H200")
    code = (
        "import sys; from rlflow.cli import main; code = main();"
        "heavy = {'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'datasets'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "recipe=grpo_7b", "dry_run=true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("grpo_7b on 1x1@h200 ")
