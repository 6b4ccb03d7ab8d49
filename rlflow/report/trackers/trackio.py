"""Runs in Trackio."""

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


class Trackio(Tracker):
    """Trackio, on this machine or in the Space of TRACKIO_SPACE_ID."""

    def open(self, plan: Plan, directory: Path, run_id: str, step: int) -> str:
        import trackio

        name = f"{plan.recipe.name}-{run_id}"
        # Its messages belong beside those of other libraries, not into the output of a run.
        with redirect_stdout(sys.stderr):
            self._run: Any = trackio.init(PROJECT, name, config=asdict(plan.recipe), resume="allow", embed=False)
        return run_id

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        import trackio

        table = {SAMPLES: trackio.Table(columns=COLUMNS, data=rows(samples))} if samples else {}
        self._run.log({**metrics, **table}, step=step)

    def close(self) -> None:
        import trackio

        with redirect_stdout(sys.stderr):
            trackio.finish()


TRACKER = Trackio
