"""The check of a whole run: DeepSpeed and vLLM take turns on one GPU, and weights go from one to the other."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rlflow.doctor.finding import Measurement

_STEPS = 3
# Sampler and trainer compute the same logprobs in bfloat16 with different kernels.
_SAMPLER_DIFFERENCE = 0.05
# The width of Qwen2.5-7B with a single layer: the embedding is a tensor of 1.09 GB.
_WIDE = (
    "model_type: qwen2, hidden_size: 3584, intermediate_size: 18944, num_hidden_layers: 1, num_attention_heads: 28, "
    "num_key_value_heads: 4, head_dim: 128, vocab_size: 152064, max_position_embeddings: 4096"
)


def overrides(cluster: str, architecture: str) -> list[str]:
    """Return the overrides of the run: ``grpo_tiny_cluster`` for a few steps, with a new model."""
    return [
        *("recipe=grpo_tiny_cluster", f"cluster={cluster}", f"steps={_STEPS}"),
        *("evaluation=null", "checkpoints.every=1000", "~models.policy.recipe"),
        "models.policy={random_weights: true, characters: '0123456789+=', dtype: bfloat16, "
        f"architecture: {{{architecture}}}}}",
    ]


def run(device: str, *, cluster: str = "auto", architecture: str = _WIDE, seconds: float = 240) -> list[Measurement]:
    """Train a few steps of GRPO with vLLM and DeepSpeed on one GPU, by the command that users type."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rlflow", *overrides(cluster, architecture), f"hydra.run.dir={folder}/run"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise RuntimeError(f"the run ended with {done.returncode}: {' '.join(said[-3:])}")
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "update/sampler_difference" in line]
    worst = max((abs(line["update/sampler_difference"]) for line in steps), default=float("inf"))
    what = "logprobs of sampler and trainer, mean difference"
    return [
        Measurement("colocated run", f"{len(steps)} steps", f"{_STEPS} steps", len(steps) == _STEPS),
        Measurement.at_most(f"colocated run: {what}", worst, _SAMPLER_DIFFERENCE),
    ]
