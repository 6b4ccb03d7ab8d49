"""How long weights take from a trainer to vLLM: ``python -m benchmarks.weight_sync [--json FILE]``.

A model of about 150 M parameters in float32, new weights, trained by the torch engine in one process and served by vLLM
in another, on a simulated host. Beside every copy its bytes are copied once within this process, which is what no way
between two processes can beat. Shown is the share of vLLM itself, which packs the weights anew for its kernels.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.lower import models_in_use
from rlflow.runtime.actors import RayWorkers
from rlflow.runtime.ray import RayRuntime

_REPEATS = 5
_OVERRIDES = (
    "recipe=grpo_tiny",
    "models.policy={recipe: null, random_weights: true, characters: '0123456789+=', dtype: float32}",
    "models.policy.architecture={model_type: qwen3, hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 16,"
    " num_attention_heads: 12, num_key_value_heads: 12, head_dim: 64, vocab_size: 13, max_position_embeddings: 64}",
    "roles.rollout.engine=vllm",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    recipe = rlflow.load(list(_OVERRIDES))
    plan = rlflow.compile(recipe, "1x1@cpu")
    models = models_in_use(recipe)
    copies, syncs, shares = [], [], []
    with tempfile.TemporaryDirectory() as folder, RayRuntime().start(plan, models, Path(folder)) as engines:
        source, target = engines["actor"].weights(), engines["rollout"].weights()
        assert isinstance(target, RayWorkers)
        architecture = recipe.models["policy"].architecture
        assert architecture is not None
        size = 4 * architecture.num_parameters
        there, here = np.zeros(size, np.uint8), np.empty(size, np.uint8)
        here[:] = there
        target.copy_weights(source, 0)
        for version in range(1, _REPEATS + 1):
            began = time.perf_counter()
            here[:] = there
            copied = time.perf_counter()
            own = target.copy_weights(source, version)
            copies.append(copied - began)
            syncs.append(time.perf_counter() - copied)
            shares.append(own / syncs[-1])
    table = Table("bytes", "copied once s", "synchronised s", "of it vLLM", "ratio")
    ratio = median(syncs) / median(copies)
    columns = (f"{size / 1e6:.0f} MB", f"{median(copies):.3f}", f"{median(syncs):.3f}", f"{median(shares):.0%}")
    table.add_row(*columns, f"{ratio:.2f}")
    Console().print(table)
    figures = {"time_over_copy": ratio, "share_of_vllm": median(shares)}
    goals = {"time_over_copy": Goal("at most 4", ratio <= 4), "share_of_vllm": Goal("shown", True)}
    return finish("weight_sync", figures, goals, json_file)


if __name__ == "__main__":
    raise SystemExit(main())
