"""Runs in SwanLab."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.batch.sample import Sample
from rlflow.compiler.plan import Plan
from rlflow.report.tracker import PROJECT, Tracker
from rlflow.report.trackers.table import COLUMNS, SAMPLES, rows


class Swanlab(Tracker):
    """SwanLab. Its files are in the folder ``swanlog`` of the run."""

    def open(self, plan: Plan, directory: Path, run_id: str, step: int) -> str:
        import swanlab

        with redirect_stdout(sys.stderr):
            self._run: Any = swanlab.init(
                project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
                name=f"{plan.recipe.name}-{run_id}",
                id=run_id,
                resume="allow",
                config=asdict(plan.recipe),
                log_dir=str(directory / "swanlog"),
            )
        return run_id

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        import swanlab

        table = {SAMPLES: swanlab.echarts.Table().add(COLUMNS, rows(samples))} if samples else {}
        self._run.log({**metrics, **table}, step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            if self.has_ended:
                self._run.finish()
            else:
                self._run.finish("crashed", error="the run failed")


TRACKER = Swanlab
