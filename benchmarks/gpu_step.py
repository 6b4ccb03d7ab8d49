"""Run five steps on this machine's GPU, and compare each node with its predicted time.

``python -m benchmarks.gpu_step [--json FILE]``

Needs one GPU, vLLM, DeepSpeed and Ray. Models of the sizes of Qwen2.5-0.5B and 1.5B have random weights: 512 responses
of 512 tokens, a reference and an update in two minibatches, as in the runs of ``benchmarks.h200_runs``. Times are
medians of the steps after the first.
"""

import argparse
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.commands.calibrate.probes import run
from rlflow.commands.doctor.machine import devices
from rlflow.compiler.plan import Plan

_STEPS = 5
_MODELS = ("qwen2_5_0_5b", "qwen2_5_1_5b")
# Nodes of fewer seconds are printed and not judged.
_LONG_S = 0.5
_GOALS = {"step_error_max": 0.2, "node_error_max": 0.3}


def arguments_of(model: str) -> list[str]:
    """Return the arguments of a model's run."""
    return [
        "recipe=grpo_tiny_cluster",
        f"+model@models.policy={model}",
        "models.policy.recipe=null",
        "models.policy.path=null",
        "models.policy.architecture_of=null",
        "models.policy.random_weights=true",
        "models.policy.characters=0123456789+\\=",
        "models.policy.dtype=bfloat16",
        "data.batch_size=64",
        "graph.rollouts.max_tokens=512",
        # Random weights end hardly any response.
        "expect.response_tokens=512",
        "evaluation=null",
        f"steps={_STEPS}",
        "roles.actor.optimizer.warmup_steps=0",
    ]


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs for one H100."""
    for model in _MODELS:
        yield rlflow.compile(rlflow.load(arguments_of(model)), "1x1")


def missing() -> str | None:
    """Return what this machine lacks; None where it can run the benchmark."""
    packages = [name for name in ("vllm", "deepspeed", "ray") if find_spec(name) is None]
    if not devices()[0]:
        return "no GPU"
    return f"not installed: {', '.join(packages)}" if packages else None


def measure(model: str, folder: Path) -> tuple[float, list[float]]:
    """Run a model and print its nodes, the largest gap first; return the error of the step, and of long nodes."""
    run([*arguments_of(model), "cluster=auto"], folder)
    report = json.loads((folder / "report.json").read_text())
    pairs = {name: pair for name, pair in report["nodes"].items() if pair["measured"]}
    print(f"{model}\n{'':16}{'predicted':>11}{'measured':>11}{'gap':>9}")
    for name, pair in [
        ("step", report["step"]),
        *sorted(pairs.items(), key=lambda item: -abs(item[1]["predicted"] - item[1]["measured"])),
    ]:
        predicted, measured = pair["predicted"], pair["measured"]
        print(f"  {name:14}{predicted:10.2f}s{measured:10.2f}s{predicted - measured:+8.2f}s")
    long = [pair for pair in pairs.values() if pair["measured"] > _LONG_S]
    step, *nodes = (abs(pair["predicted"] / pair["measured"] - 1) for pair in (report["step"], *long))
    return step, nodes


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    if (lacks := missing()) is not None:
        print(f"gpu_step: needs a GPU with vLLM, DeepSpeed and Ray ({lacks})")
        return 1
    with TemporaryDirectory(prefix="rlflow-gpu-step-") as temporary:
        results = [measure(model, Path(temporary) / model) for model in _MODELS]
    figures = {
        "step_error_max": max(step for step, _ in results),
        "node_error_max": max(error for _, nodes in results for error in nodes),
    }
    goals = {name: Goal(f"at most {_GOALS[name]:g}", value <= _GOALS[name]) for name, value in figures.items()}
    return finish("gpu_step", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
