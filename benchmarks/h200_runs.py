"""Compare the time model with two runs that were measured on one H200, as the code was then.

``python -m benchmarks.h200_runs [--json FILE]``

The runs (RESULTS.md, "On a GPU") took place before the output layer and decoder layers were compiled, before queries
stayed where they are in attention, and before roles stayed on the GPU. So they are predicted with the planner's own
formulas and the costs of that code, each of which ``THEN`` and ``plans`` name. The costs of turns come from the smaller
run: only its copy and update are predictions. Nothing comes from the larger run. The last column is what the planner
expects of the present code, which has not been measured.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler import compile_recipe
from rlflow.compiler.models import role_architecture
from rlflow.compiler.plan import Plan
from rlflow.recipe.compose import load_cluster
from rlflow.resources.demand import Demand
from rlflow.resources.layout import Layout
from rlflow.resources.planner.prediction import task_times
from rlflow.resources.time.passes import Kernels
from rlflow.resources.time.speed import Efficiency, Speed

_CLUSTER = "1x1@h200"
# Each role that gave up GPU memory collected all garbage of its process. The smaller run's scores took 0.48 s, of which
# the model's work is 3 ms.
THEN = Efficiency(turn_s=0.48)
# Bytes that the eager output layer moved for each logit in training and in scoring, counted operator by operator.
_LOGIT_BYTES = (110.0, 56.0)
# Elements per second that the backward pass of a gather added up in bfloat16 (pytorch, pull request 183950, on B200).
_GATHERED_PER_S = 41e9


@dataclass(frozen=True)
class Run:
    """A run with its overrides, the layout that it had, and what it measured."""

    name: str
    overrides: Sequence[str]
    utilization: float
    step: float
    nodes: Mapping[str, float]
    """Seconds of each node that was measured."""

    def plan(self, *pins: str, calibration: Mapping[str, Efficiency]) -> Plan:
        recipe = rlflow.load(["recipe=grpo_tiny_cluster", *self.overrides, *pins])
        return compile_recipe(recipe, load_cluster(_CLUSTER), calibration)

    def plan_then(self) -> Plan:
        """Return the plan with the layout and the costs of the code that was measured."""
        layout = (
            f"roles.rollout.gpu_memory_utilization={self.utilization}",
            "roles.actor.zero_stage=2",
            "roles.actor.gradient_checkpointing=false",
        )
        with mock.patch.object(task_times, "engine_kernels", _kernels_then):
            return self.plan(*layout, calibration={"h200": THEN})

    def plan_now(self) -> Plan:
        """Return the plan of the present code."""
        return self.plan(calibration={})


RUNS = (
    Run(
        "tiny model",
        (),
        utilization=0.9,
        step=3.2,
        nodes={"rollouts": 1.5, "reference": 0.48, "update": 0.51, "actor->rollout": 0.56},
    ),
    Run(
        "Qwen2.5-0.5B",
        (
            "+model@models.policy=qwen2_5_0_5b",
            "models.policy.recipe=null",
            "models.policy.dtype=bfloat16",
            "data.batch_size=64",
            "graph.rollouts.max_tokens=512",
            # Random weights end hardly any response.
            "expect.response_tokens=512",
        ),
        utilization=0.85,
        step=17.5,
        nodes={"rollouts": 9.5, "reference": 1.9, "update": 5.1, "actor->rollout": 0.68},
    ),
)
_COMPILED_KERNELS = task_times.engine_kernels


def _kernels_then(demand: Demand, layout: Layout, speed: Speed) -> Kernels:
    kernels = _COMPILED_KERNELS(demand, layout, speed)
    return replace(kernels, fused_layers=False, logit_bytes=_LOGIT_BYTES)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of both runs with the present code."""
    for run in RUNS:
        yield run.plan_now()


def seconds_then(run: Run) -> dict[str, float]:
    """Return the predicted seconds of the step and of each node, with the costs of the code that was measured."""
    plan = run.plan_then()
    seconds = {"step": plan.prediction.step_seconds}
    seconds |= {node: time.seconds for node, time in plan.prediction.nodes.items()}
    model = role_architecture(plan.recipe, plan.graph, "actor")
    assert model is not None
    [update] = [task for task in plan.workload.tasks if task.kind == "update"]
    # Queries, keys, values and outputs were laid out anew for attention, and their gradients added up.
    elements = 2 * (model.query_width + model.key_value_width / 2) * model.num_hidden_layers * update.tokens
    for name in ("step", update.node):
        seconds[name] += elements / _GATHERED_PER_S
    return seconds


def compare(run: Run) -> tuple[float, dict[str, float]]:
    """Print predicted beside measured seconds; return the error of the step, and of nodes of more than 0.5 s."""
    then, now = seconds_then(run), run.plan_now().prediction
    print(f"{run.name:<16}{'predicted':>10}{'measured':>10}{'error':>8}{'present code':>14}")
    errors = {}
    for name, measured in {"step": run.step, **run.nodes}.items():
        errors[name] = then[name] / measured - 1
        expected = now.step_seconds if name == "step" else now.nodes[name].seconds
        print(f"  {name:<14}{then[name]:9.2f}s{measured:9.2f}s{errors[name]:8.0%}{expected:13.2f}s")
    step = errors.pop("step")
    return abs(step), {node: abs(error) for node, error in errors.items() if run.nodes[node] > 0.5}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    results = [compare(run) for run in RUNS]
    figures = {
        "step_error_max": max(step for step, _ in results),
        "node_error_max": max(error for _, nodes in results for error in nodes.values()),
    }
    most = {"step_error_max": 0.2, "node_error_max": 0.35}
    goals = {name: Goal(f"at most {most[name]:g}", value <= most[name]) for name, value in figures.items()}
    return finish("h200_runs", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
