"""Compare what a recipe learns in one process and on simulated hosts.

``python -m benchmarks.cluster_learning [--seeds N] [--json FILE]``

The tiny recipe runs once in this process, and once on two simulated hosts with vLLM and two ranks of DeepSpeed. Both
start from the same model. The table shows the held-out reward before and after, for each seed.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan

_HOSTS = "2x1@cpu"
_STEPS = 100
# The gain of the run in one process, minus the spread of its seeds.
_GAIN = 0.4
_SPREAD = tuple(f"roles.{role}.gpus=2" for role in ("actor", "reference", "rollout"))


def plan_of(recipe: str, cluster: str, seed: int, *pins: str) -> Plan:
    overrides = (f"recipe={recipe}", f"seed={seed}", f"steps={_STEPS}", f"evaluation.every={_STEPS}", *pins)
    return rlflow.compile(rlflow.load(overrides), cluster)


def local_plan(seed: int) -> Plan:
    return plan_of("grpo_tiny", "local", seed)


def plan_on_hosts(seed: int) -> Plan:
    return plan_of("grpo_tiny_cluster", _HOSTS, seed, *_SPREAD)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of the runs with one seed."""
    yield from (local_plan(0), plan_on_hosts(0))


def gains(plan: Plan) -> tuple[float, float]:
    """Return the held-out reward before and after training."""
    with tempfile.TemporaryDirectory() as folder:
        report = rlflow.run(plan, Path(folder) / "run")
    assert report.eval_before is not None
    assert report.eval_after is not None
    return report.eval_before, report.eval_after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    table = Table("seed", "before", "one process", "two hosts")
    local, hosts = [], []
    for seed in range(options.seeds):
        before, after = gains(local_plan(seed))
        local.append(after - before)
        _, there = gains(plan_on_hosts(seed))
        hosts.append(there - before)
        table.add_row(str(seed), f"{before:.3f}", f"{after:.3f}", f"{there:.3f}")
    Console().print(table)
    figures = {"gain_local_min": min(local), "gain_hosts_min": min(hosts)}
    goals = {name: Goal(f"at least {_GAIN}", gain >= _GAIN) for name, gain in figures.items()}
    return finish("cluster_learning", figures, goals, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
