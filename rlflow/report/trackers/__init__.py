"""The trackers that a recipe can name: libraries that show the metrics and samples of runs beside each other.

Each has one file, named as in a recipe, whose class is ``TRACKER``. ``rlflow.extras`` lists them with their libraries,
which are imported when a run starts that names them. Keys and servers are set as each library documents them.
"""

from collections.abc import Callable, Sequence
from importlib import import_module

from rlflow.errors import RecipeError
from rlflow.plugins import load_object
from rlflow.report.tracker import Guard, Tracker
from rlflow.runtime.protocols import Observer


def trackers(names: Sequence[str], warn: Callable[[str], object]) -> list[Observer]:
    """Return the trackers that a recipe names; ``warn`` is called once for each that fails. Raises RecipeError."""
    return [Guard(name, _tracker(name, f"trackers.{index}"), warn) for index, name in enumerate(names)]


def _tracker(name: str, path: str) -> Observer:
    kind = load_object(name, path) if ":" in name else import_module(f".{name}", __package__).TRACKER
    if not (isinstance(kind, type) and issubclass(kind, Observer)):
        raise RecipeError(path, f"'{name}' is not a tracker", fix="derive it from rlflow.report.tracker.Tracker")
    tracker = kind()
    if isinstance(tracker, Tracker):
        tracker.name = name
    return tracker
