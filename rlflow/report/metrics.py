"""metrics.jsonl and TensorBoard events."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rlflow.compiler.plan import Plan
from rlflow.report.lines import keep_until
from rlflow.runtime.base import Observer


class MetricsWriter(Observer):
    """A line a step and a line an evaluation, in ``metrics.jsonl``; the same as TensorBoard events."""

    def __init__(self) -> None:
        self._file: IO[str]
        self._events: Any
        self._evaluated: str

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._evaluated = f"evaluation/{plan.graph.evaluated}"
        path = directory / "metrics.jsonl"
        keep_until(path, step)
        self._file = path.open("a")
        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)

    def evaluated(self, step: int, figure: float) -> None:
        self._write(step, {self._evaluated: figure})

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step, metrics)

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
