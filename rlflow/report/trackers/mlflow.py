"""Runs in MLflow."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlflow.batch.sample import Sample
from rlflow.compiler.plan import Plan
from rlflow.report.records import read_lines
from rlflow.report.run_page import leaves
from rlflow.report.tracker import PROJECT, Tracker
from rlflow.report.trackers.table import COLUMNS, SAMPLES, row

# MLflow allows no other characters in names.
_NOT_IN_NAMES = re.compile(r"[^\w./ :-]", re.ASCII)
# MLflow takes no more parameters at once.
_PARAMETERS = 100
_TABLE = f"{SAMPLES}.json"


class Mlflow(Tracker):
    """MLflow, on the server of MLFLOW_TRACKING_URI, or else in ``mlflow.db`` in the working directory."""

    def open(self, plan: Plan, directory: Path, run_id: str, step: int) -> str:
        # Without a network, a call fails after seconds and not after minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._directory = directory
        self._client: Any = MlflowClient()
        if step:
            self._id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = str(self._client.create_run(experiment_id, run_name=f"{plan.recipe.name}-{run_id}").info.run_id)
        values = [Param(_NOT_IN_NAMES.sub("_", path), value) for path, value in leaves(asdict(plan.recipe), "")]
        for start in range(0, len(values), _PARAMETERS):
            self._client.log_batch(self._id, params=values[start : start + _PARAMETERS])
        return self._id

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        """End the run with a table of all samples: a table that grows would be sent again in each step."""
        path = self._directory / "samples.jsonl"
        if lines := read_lines(path) if path.exists() else []:
            table = {"columns": COLUMNS, "data": [row(line) for line in lines]}
            self._client.log_dict(self._id, table, _TABLE)
            self._client.set_tag(self._id, "mlflow.loggedArtifacts", json.dumps([{"path": _TABLE, "type": "table"}]))
        self._client.set_terminated(self._id, "FINISHED" if self.has_ended else "FAILED")


TRACKER = Mlflow
