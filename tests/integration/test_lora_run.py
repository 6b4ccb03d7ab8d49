"""Runs of adapters from the command line, in this process's kind and on simulated hosts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import CONFIG_DIR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "rlflow", "--config-dir", str(CONFIG_DIR), "recipe=real"]
OVERRIDES = [
    # The least that vLLM takes on the CPU.
    "models.policy.architecture.head_dim=32",
    "roles.actor.lora={rank: 4, alpha: 8}",
    "~roles.reference",
    "graph.reference={node: base_logprobs, role: actor}",
    # A new model writes nothing that is right, but not always as much.
    "~graph.rewards.function",
    "graph.rewards.functions={length: {options: {max_characters: 4, buffer: 4}}}",
    "data.batch_size=16",
    "steps=4",
]
CLUSTER = ["cluster=2x1@cpu", "roles.actor.engine=deepspeed", "roles.rollout.engine=vllm"]


def run(folder: Path, *overrides: str) -> None:
    command = [*COMMAND, *OVERRIDES, *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("where", [[], pytest.param(CLUSTER, marks=pytest.mark.soak)], ids=["local", "cluster"])
def test_what_goes_on_from_a_checkpoint_ends_in_the_same_model(where: list[str], tmp_path: Path) -> None:
    run(tmp_path, *where)
    (folder,) = tmp_path.glob("outputs/*/*")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [step for step in steps if "update/kl" in step]
    assert len(updates) == 4
    # Before the first step the actor is its own reference, up to rounding.
    assert updates[0]["update/kl"] < 1e-6 < updates[-1]["update/kl"]
    # The engine has written with the adapters of the trainer: both compute in float32.
    assert max(step["update/sampler_difference"] for step in updates) < 1e-4
    exported = folder / "model" / "actor"
    weights = load_file(exported / "model.safetensors")
    assert not [name for name in weights if "lora" in name or "base_layer" in name]
    AutoModelForCausalLM.from_pretrained(exported)
    adapters = load_file(exported / "adapters" / "adapter_model.safetensors")
    # 2 layers of q 16 -> 64, k and v 16 -> 32, o 64 -> 16, and the MLP 16 -> 32, 16 -> 32, 32 -> 16.
    sent = sum(weight.numel() for weight in adapters.values())
    assert sent == 4 * 2 * (2 * (16 + 64) + 2 * (16 + 32) + 3 * (16 + 32)) == 3200
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    shutil.rmtree(folder / "model")
    run(tmp_path, *where, f"resume={folder}")
    again = load_file(exported / "model.safetensors")
    assert all((weights[name] == again[name]).all() for name in weights)
