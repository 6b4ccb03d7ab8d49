"""The base of trackers, and the guard that keeps a run going when its tracker fails."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from rlflow.batch.sample import Sample
from rlflow.compiler.plan import Plan
from rlflow.errors import first_line
from rlflow.report.records import METRICS, is_evaluation, read_lines
from rlflow.runtime.protocols import Observer, Report
from rlflow.system.text_files import replace_text

PROJECT = "rlflow"
"""The project of all runs, where the tracker's own settings name no other."""
_FILE = "trackers.json"
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
# Shorter values may be words, such as "true".
_SHORTEST_SECRET = 8


class Tracker(Observer):
    """The base of trackers. A class of your own needs ``open`` and ``log``.

    A resumed run continues the tracker's run, and logs only steps that it has not logged before.
    """

    name = ""
    """The name in the recipe."""
    replaces_steps: ClassVar[bool] = False
    """True if ``open`` removes the steps after the one that a run resumes from, so that they are logged again."""

    def open(self, plan: Plan, directory: Path, run_id: str, step: int) -> str:
        """Continue the tracker's run ``run_id`` after ``step`` steps; return its id.

        With 0 steps, start a new run. Its id may be ``run_id``, which is random, or another one.
        """
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Log the metrics of a step with its samples, or the metrics of an evaluation after that step."""
        raise NotImplementedError

    def started(self, plan: Plan, directory: Path, step: int) -> None:
        path = directory / _FILE
        ids = json.loads(path.read_text("utf-8")) if path.exists() else {}
        is_resumed = step > 0 and self.name in ids
        # These are all lines of the run so far: trackers come before the observer that removes those to be repeated.
        lines = read_lines(directory / METRICS) if is_resumed and not self.replaces_steps else []
        evaluations = [line["step"] for line in lines if is_evaluation(line)]
        self._last_step = max([step, *(line["step"] for line in lines if not is_evaluation(line))])
        self._last_evaluation = max([-1, *evaluations])
        self._samples: Sequence[Sample] = ()
        self.has_ended = False
        run_id = ids[self.name] if is_resumed else uuid4().hex[:8]
        ids[self.name] = self.open(plan, directory, run_id, step if is_resumed else 0)
        replace_text(path, json.dumps(ids, indent=1))

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._last_evaluation:
            self.log(step, metrics, ())

    def sampled(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._last_step:
            self.log(step, metrics, self._samples)
        self._samples = ()

    def ended(self, report: Report) -> None:
        self.has_ended = True


class Guard(Observer):
    """A tracker whose failure is a warning: the run continues without it."""

    def __init__(self, name: str, tracker: Observer, warn: Callable[[str], object]) -> None:
        self._name, self._tracker, self._warn = name, tracker, warn
        self._works = True

    def send(self, event: str, *arguments: Any) -> None:
        """Send an event to the tracker, as long as it works."""
        if not self._works:
            return
        try:
            getattr(self._tracker, event)(*arguments)
        except Exception as error:  # libraries raise errors of many kinds, often about the network
            self._works = False
            with suppress(Exception):
                self._tracker.close()
            self._warn(
                f"the tracker '{self._name}' failed, and the run continues without it ({redact(first_line(error))})"
            )


def _sender(event: str) -> Callable[..., None]:
    def send(self: Guard, *arguments: Any) -> None:
        self.send(event, *arguments)

    return send


for _event in [name for name in vars(Observer) if not name.startswith("_")]:
    setattr(Guard, _event, _sender(_event))


def redact(text: str) -> str:
    """Return the text without secrets: values of environment variables such as WANDB_API_KEY, and logins in URLs."""
    secrets = {
        value for name, value in os.environ.items() if _SECRET.search(name.upper()) and len(value) >= _SHORTEST_SECRET
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return re.sub(r"(://)[^/\s@]+@", r"\1***@", text)
