"""Train a tiny model to read digits: ``python -m benchmarks.vision_digits [--seeds N] [--json FILE]``.

The recipe ``grpo_digits`` runs in this process, each time after the recipe whose model it starts from, with an empty
cache.

- ``digits_min``: the smallest share of held-out digits that are read after training.
- ``digits_exchanged_max``: the largest share where each row has the image of another. A model that guesses has 0.1.
- ``digits_seconds_max``: the time of the longest run, with that of the recipe that it starts from.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.plan import Plan
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run

READ, EXCHANGED, SECONDS = 0.9, 0.2, 180.0


def plan_of(seed: int) -> Plan:
    """Return the plan of a run."""
    return rlflow.compile(rlflow.load(["recipe=grpo_digits", f"seed={seed}"]), "local")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plan of a run."""
    yield plan_of(0)


def read_digits(seed: int) -> tuple[float, float, float]:
    """Return the shares of digits that are read after a run, the second with exchanged images, and the seconds."""
    start = time.perf_counter()
    with TemporaryDirectory() as folder, patch.dict(os.environ, RLFLOW_CACHE=str(Path(folder) / "cache")):
        run(plan_of(seed), Path(folder) / "run", LocalRuntime(), [MetricsWriter()])
        seconds = time.perf_counter() - start
        metrics = json.loads((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    shares = metrics["evaluation/reward"], metrics["evaluation/exchanged/reward"]
    print(f"seed {seed}: {shares[0]:.3f}, with exchanged images {shares[1]:.3f}, in {seconds:.0f} s")
    return *shares, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many runs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    read, exchanged, seconds = zip(*map(read_digits, range(arguments.seeds)), strict=True)
    figures = {
        "digits_min": min(read),
        "digits_exchanged_max": max(exchanged),
        "digits_seconds_max": max(seconds),
    }
    goals = {
        "digits_min": Goal(f"at least {READ:g}", figures["digits_min"] >= READ),
        "digits_exchanged_max": Goal(f"at most {EXCHANGED:g}", figures["digits_exchanged_max"] <= EXCHANGED),
        "digits_seconds_max": Goal(f"at most {SECONDS:g} s", figures["digits_seconds_max"] <= SECONDS),
    }
    return finish("vision_digits", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
