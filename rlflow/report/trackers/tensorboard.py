"""Runs in TensorBoard."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.batch.sample import Sample
from rlflow.compiler.plan import Plan
from rlflow.recipe.load import to_yaml
from rlflow.report.tracker import Tracker


class TensorBoard(Tracker):
    """TensorBoard. Its files are in the folder ``tensorboard`` of the run."""

    replaces_steps = True

    def open(self, plan: Plan, directory: Path, run_id: str, step: int) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._events: Any = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else 0)
        if step == 0:
            self._events.add_text("recipe", f"```yaml\n{to_yaml(plan.recipe)}```")
        return run_id

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all metrics takes a quarter of the time of one for each.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._events.file_writer.add_summary(Summary(value=values), step)

    def close(self) -> None:
        self._events.close()


TRACKER = TensorBoard
