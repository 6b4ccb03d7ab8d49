"""Runs in Weights & Biases."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.batch.sample import Sample
from rlflow.compiler.plan import Plan
from rlflow.report.tracker import PROJECT, Tracker
from rlflow.report.trackers.table import COLUMNS, SAMPLES, rows


class Wandb(Tracker):
    """Weights & Biases. Its files are in the folder ``wandb`` of the run."""

    def open(self, plan: Plan, directory: Path, run_id: str, step: int) -> str:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=f"{plan.recipe.name}-{run_id}",
            id=run_id,
            resume="allow",
            config=asdict(plan.recipe),
            dir=str(directory),
            # The output of a program may hold secrets, and a progress bar is no log.
            settings=wandb.Settings(console="off"),
        )
        return run_id

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        import wandb

        table = {SAMPLES: wandb.Table(columns=COLUMNS, data=rows(samples))} if samples else {}
        self._run.log({**metrics, **table}, step=step)

    def close(self) -> None:
        self._run.finish(exit_code=0 if self.has_ended else 1)


TRACKER = Wandb
