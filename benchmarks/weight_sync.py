"""Measure how long weights take from a trainer to vLLM: ``python -m benchmarks.weight_sync [--json FILE]``.

A model of about 150 M parameters in float32 with random weights is trained by the torch engine in one process and
served by vLLM in another, on a simulated host. For comparison, every tensor is copied within this process: to new
memory, which any second copy of the weights needs, and to memory that is already in use, which is the lower bound.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.runtime.ray.role_workers import RoleWorkers
from rlflow.runtime.ray.runtime import RayRuntime
from tests.helpers import spec

_REPEATS = 5
_OVERRIDES = (
    "recipe=grpo_tiny",
    "models.policy={recipe: null, random_weights: true, characters: '0123456789+=', dtype: float32}",
    "models.policy.architecture={model_type: qwen3, hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 16,"
    " num_attention_heads: 12, num_key_value_heads: 12, head_dim: 64, vocab_size: 13, max_position_embeddings: 64}",
    "roles.rollout.engine=vllm",
)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plan of both engines."""
    yield rlflow.compile(rlflow.load(_OVERRIDES), "1x1@cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    (plan,) = plans(Path())
    models = models_in_use(plan.recipe)
    own = load_model(spec(model=models["policy"]), dtype=torch.float32).state_dict()
    again = {name: tensor.clone() for name, tensor in own.items()}
    new_s, used_s, syncs = [], [], []
    with tempfile.TemporaryDirectory() as folder, RayRuntime().start(plan, models, Path(folder)) as engines:
        source, target = engines["actor"].workers, engines["rollout"].workers
        assert isinstance(target, RoleWorkers)
        target.sync_weights(source, 0)
        for version in range(1, _REPEATS + 1):
            began = time.perf_counter()
            copied = {name: tensor.clone() for name, tensor in own.items()}
            new_s.append(time.perf_counter() - began)
            del copied
            began = time.perf_counter()
            for name, tensor in own.items():
                again[name].copy_(tensor)
            used_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            target.sync_weights(source, version)
            syncs.append(time.perf_counter() - began)
    size = sum(tensor.nbytes for tensor in own.values())
    table = Table("bytes", "copy to new memory", "copy to used memory", "weight sync")
    seconds = [f"{median(values):.3f} s" for values in (new_s, used_s, syncs)]
    table.add_row(f"{size / 1e6:.0f} MB", *seconds)
    Console().print(table)
    figures = {
        "time_over_copy": median(syncs) / median(new_s),
        "time_over_copy_in_use": median(syncs) / median(used_s),
    }
    shown = Goal("for information", True)
    goals = dict.fromkeys(figures, shown) | {"time_over_copy": Goal("at most 4", figures["time_over_copy"] <= 4)}
    return finish("weight_sync", figures, goals, json_file)


if __name__ == "__main__":
    raise SystemExit(main())
