"""Measures this machine or a Ray cluster for the planner: ``rlflow calibrate [--cluster C] [--output F]``.

It takes two to five minutes, and writes a file for ``calibration=FILE``.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from rlflow.commands.calibrate.fit import calibration_from_runs, read_run
from rlflow.commands.calibrate.machine import MachineFigures, measure
from rlflow.commands.calibrate.probes import ONE_HOST, probes, run_probes
from rlflow.resources.time.calibration import calibration_figures, default_efficiency
from rlflow.resources.time.speed import Efficiency


def main(arguments: Sequence[str]) -> int:
    """Measure, print each figure, and write the file; return the exit code."""
    parser = argparse.ArgumentParser("rlflow calibrate", description=__doc__)
    parser.add_argument("--cluster", default=ONE_HOST, help="the cluster that the short runs use, as in cluster=")
    parser.add_argument("--output", type=Path, default=Path("calibration.yaml"), help="the file to write")
    options = parser.parse_args(arguments)
    calibrate(options.cluster, options.output)
    return 0


def calibrate(cluster: str, output: Path) -> None:
    """Measure the machine, run the probes on ``cluster``, and write the calibration."""
    import torch

    start = time.perf_counter()
    # Idle threads of a run spin only briefly; the measurements use the same setting.
    os.environ.setdefault("GOMP_SPINCOUNT", "1500")
    on_gpu = torch.cuda.is_available() and not cluster.endswith("@cpu") and cluster != "local"
    machine = measure("cuda:0" if on_gpu else "cpu")
    for line in describe(machine):
        print(line, flush=True)
    runs = []
    with TemporaryDirectory(prefix="rlflow-calibrate-") as folder:
        for probe, directory in run_probes(probes(on_gpu=on_gpu), cluster, Path(folder)):
            plan, report = read_run(directory)
            print(f"run {probe.name:<12} {report['step']['measured']:.3f} s/step", flush=True)
            runs.append((plan, report))
    kinds = {host.gpu: plan.cluster.gpus[host.gpu] for plan, _ in runs for host in plan.cluster.hosts}
    known = {kind: with_machine(default_efficiency(gpu), machine) for kind, gpu in kinds.items()}
    content = yaml.safe_dump(calibration_figures(calibration_from_runs(runs, known)), sort_keys=False)
    output.write_text("".join(f"# {line}\n" for line in describe(machine)) + content)
    print(f"{output} in {time.perf_counter() - start:.0f} s; use it with calibration={output}")


def with_machine(efficiency: Efficiency, machine: MachineFigures) -> Efficiency:
    """Return the efficiency with the machine's own figures in place of a data sheet."""
    return replace(
        efficiency,
        peak_tflops=machine.peak_tflops,
        narrow=machine.narrow,
        memory_gb_s=machine.memory_gb_s,
        link_gb_s=machine.link_gb_s,
    )


def describe(machine: MachineFigures) -> list[str]:
    """Return what was measured, a line for each figure."""
    products = ", ".join(f"{width}: {1000 * value:.0f}" for width, value in machine.tflops.items())
    lines = [
        f"matrix products by width, GFLOP/s: {products}",
        f"memory bandwidth: {machine.memory_gb_s:.1f} GB/s",
        f"launch of a kernel: {1e6 * machine.launch_s:.1f} us",
        f"host memory: {machine.host_gib:.1f} GiB",
    ]
    if machine.link_gb_s is not None:
        lines.append(f"between two processes: {machine.link_gb_s:.2f} GB/s")
    if machine.allocator_slack is not None:
        lines.append(f"allocator slack: {machine.allocator_slack:.0%} of what is allocated and freed")
    return lines
