"""Runs of adapters from the command line, in this process and on simulated hosts."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import CONFIG_DIR, Typed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ARGUMENTS = [
    *("--config-dir", str(CONFIG_DIR), "recipe=real"),
    # The least that vLLM takes on the CPU.
    "models.policy.architecture.head_dim=32",
    "roles.actor.lora={rank: 4, alpha: 8}",
    "~roles.reference",
    "graph.reference={node: base_logprobs, role: actor}",
    # The responses of a new model are all wrong, but differ in length.
    "~graph.rewards.function",
    "graph.rewards.functions={length: {options: {max_characters: 4, buffer: 4}}}",
    "data.batch_size=16",
    "steps=4",
]
CLUSTER = ["cluster=2x1@cpu", "roles.actor.engine=deepspeed", "roles.rollout.engine=vllm"]


@pytest.mark.parametrize("where", [[], pytest.param(CLUSTER, marks=pytest.mark.soak)], ids=["local", "cluster"])
def test_a_resumed_run_ends_in_the_same_model(where: list[str], typed: Typed, tmp_path: Path) -> None:
    code, out, errors = typed(*ARGUMENTS, *where)
    assert code == 0, out + errors
    (folder,) = tmp_path.glob("outputs/*/*")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [step for step in steps if "update/kl" in step]
    assert len(updates) == 4
    # Before the first step the actor is its own reference, up to rounding.
    assert updates[0]["update/kl"] < 1e-6 < updates[-1]["update/kl"]
    # The engine has sampled with the adapters of the trainer, and both compute in float32.
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
    code, out, errors = typed(*ARGUMENTS, *where, f"resume={folder}")
    assert code == 0, out + errors
    again = load_file(exported / "model.safetensors")
    assert all((weights[name] == again[name]).all() for name in weights)
