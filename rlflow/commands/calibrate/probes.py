"""Short runs of rlflow itself with models of random weights, whose reports show the overheads of its engines."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import ascii_letters
from typing import Any

import yaml

from rlflow.errors import EngineError

_CHARACTERS = "0123456789+=" + ascii_letters
ONE_HOST, TWO_HOSTS = "1x1@cpu", "2x1@cpu"
# The tokens of a prompt of ``data/additions``.
_PROMPT_TOKENS = 6
_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The sizes of one run."""

    name: str
    hidden_size: int
    num_layers: int
    batch_size: int
    group_size: int
    max_tokens: int
    on_hosts: bool = False
    """With the engines of a cluster, instead of those that share a process."""


# Few and many layers, narrow and wide ones, few and many samples, short and long responses.
CPU_PROBES = (
    Probe(name="narrow", hidden_size=64, num_layers=2, batch_size=16, group_size=8, max_tokens=16),
    Probe(name="samples", hidden_size=64, num_layers=4, batch_size=96, group_size=8, max_tokens=3),
    Probe(name="deep", hidden_size=256, num_layers=8, batch_size=4, group_size=8, max_tokens=24),
    Probe(name="wide", hidden_size=512, num_layers=6, batch_size=4, group_size=4, max_tokens=32),
)
CPU_HOST_PROBES = (
    Probe(name="hosts", hidden_size=64, num_layers=4, batch_size=32, group_size=8, max_tokens=8, on_hosts=True),
    Probe(name="wide hosts", hidden_size=512, num_layers=4, batch_size=4, group_size=4, max_tokens=24, on_hosts=True),
)
GPU_PROBES = (
    Probe(name="narrow", hidden_size=1024, num_layers=8, batch_size=32, group_size=8, max_tokens=128, on_hosts=True),
    Probe(name="wide", hidden_size=4096, num_layers=4, batch_size=16, group_size=8, max_tokens=256, on_hosts=True),
)


def probes(*, on_gpu: bool) -> tuple[Probe, ...]:
    """Return the probes that the installed libraries allow."""
    has_hosts = all(find_spec(name) is not None for name in ("ray", "vllm", "deepspeed"))
    if on_gpu:
        return GPU_PROBES if has_hosts else ()
    return (*CPU_PROBES, *(CPU_HOST_PROBES if has_hosts else ()))


def recipe_of(probe: Probe) -> dict[str, Any]:
    """Return the recipe of a probe, as the content of a recipe file."""
    heads = probe.hidden_size // 32
    architecture = {
        "model_type": "qwen3",
        "hidden_size": probe.hidden_size,
        "intermediate_size": 4 * probe.hidden_size,
        "num_hidden_layers": probe.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "vocab_size": len(_CHARACTERS) + 1,
        "max_position_embeddings": 8 + probe.max_tokens,
        "tie_word_embeddings": True,
    }
    model = {"random_weights": True, "characters": _CHARACTERS, "architecture": architecture, "dtype": "float32"}
    trainer, server = ("deepspeed", "vllm") if probe.on_hosts else ("torch", "transformers")
    return {
        "defaults": [{"/algorithm": "grpo"}, {"/data": "additions"}, "_self_"],
        "name": f"calibrate_{probe.name.replace(' ', '_')}",
        "steps": _STEPS,
        "models": {"policy": model},
        "roles": {
            # Weights stay nearly random, and with them the lengths of responses.
            "actor": {"engine": trainer, "optimizer": {"learning_rate": 1e-6}},
            "rollout": {"engine": server},
            "reference": {"engine": "deepspeed" if probe.on_hosts else "transformers"},
        },
        "graph": {
            "rollouts": {"group_size": probe.group_size, "max_tokens": probe.max_tokens},
            "rewards": {"function": "exact"},
            "update": {"num_minibatches": 2},
        },
        "data": {"batch_size": probe.batch_size},
        "checkpoints": {"every": 2 * _STEPS},
        "expect": {"prompt_tokens": _PROMPT_TOKENS, "response_tokens": untrained_lengths(probe.max_tokens)},
    }


def untrained_lengths(max_tokens: int) -> list[int]:
    """Return equally likely lengths of responses that end after each token with the same small chance."""
    ends = 1 / (len(_CHARACTERS) + 1)
    quantiles = [(index + 0.5) / 16 for index in range(16)]
    survivors = [(1 - ends) ** tokens for tokens in range(1, max_tokens)]
    return [1 + sum(survivor > 1 - quantile for survivor in survivors) for quantile in quantiles]


def write_recipe(recipe: dict[str, Any], folder: Path) -> Path:
    """Write a recipe file, and return its path."""
    path = folder / f"{recipe['name']}.yaml"
    path.write_text("# @package _global_\n" + yaml.safe_dump(recipe, sort_keys=False))
    return path


def run(arguments: Sequence[str], folder: Path, seconds: float | None = None) -> None:
    """Run rlflow in a process of its own, as from the command line. Raises EngineError where it fails."""
    command = [sys.executable, "-m", "rlflow", *arguments, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise EngineError(f"{' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()[-500:]}")


def run_probes(selected: Sequence[Probe], cluster: str, folder: Path) -> Iterator[tuple[Probe, Path]]:
    """Run each probe, and yield it with the folder of its run.

    Simulated hosts share a machine, and ranks on them exchange gradients through its memory. So engines of a cluster
    run on two of them where ``cluster`` is this machine's CPU.
    """
    for probe in selected:
        directory = folder / probe.name.replace(" ", "_")
        where = TWO_HOSTS if probe.on_hosts and cluster == ONE_HOST else cluster
        run([f"recipe={write_recipe(recipe_of(probe), folder)}", f"cluster={where}"], directory)
        yield probe, directory
