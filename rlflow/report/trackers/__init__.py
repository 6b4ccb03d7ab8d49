"""The trackers that a recipe can name: libraries that show the metrics and samples of runs beside each other.

Each library is imported when a run starts that names it. Its keys and servers are set as it documents them.
"""

from collections.abc import Callable, Mapping, Sequence

from rlflow.errors import RecipeError
from rlflow.plugins import load_object
from rlflow.report.tracker import Guard, Tracker
from rlflow.report.trackers.mlflow import Mlflow
from rlflow.report.trackers.swanlab import Swanlab
from rlflow.report.trackers.tensorboard import TensorBoard
from rlflow.report.trackers.trackio import Trackio
from rlflow.report.trackers.wandb import Wandb
from rlflow.runtime.protocols import Observer

TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "swanlab": Swanlab,
}


def trackers(names: Sequence[str], warn: Callable[[str], object]) -> list[Observer]:
    """Return the trackers that a recipe names; ``warn`` is called once for each that fails. Raises RecipeError."""
    return [Guard(name, _tracker(name, f"trackers.{index}"), warn) for index, name in enumerate(names)]


def _tracker(name: str, path: str) -> Observer:
    kind = load_object(name, path) if ":" in name else TRACKERS[name]
    if not (isinstance(kind, type) and issubclass(kind, Observer)):
        raise RecipeError(path, f"'{name}' is not a tracker", fix="derive it from rlflow.report.tracker.Tracker")
    tracker = kind()
    if isinstance(tracker, Tracker):
        tracker.name = name
    return tracker
