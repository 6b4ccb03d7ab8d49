"""The jobs of a sweep, each with a file in the sweep's folder.

Launchers run jobs in other processes or on other hosts. Each job therefore leaves a file, and the process that started
the sweep reads these files when it ends.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback

from rlflow.compiler.plan import read_plan
from rlflow.report.ranking import SweepOutcome
from rlflow.system.text_files import replace_text

_JOBS = "jobs"


class SweepFolder(Callback):
    """A callback of Hydra's that knows the folder of the sweep that this process has started."""

    path: ClassVar[Path | None] = None
    """None for a single run."""

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """Remember the folder, and remove the files of an earlier sweep there."""
        SweepFolder.path = Path(config.hydra.sweep.dir)
        for file in (SweepFolder.path / _JOBS).glob("*.json"):
            file.unlink()


@dataclass(frozen=True, kw_only=True)
class Job:
    """The result of a job of a sweep, which is also a file in the sweep's folder."""

    overrides: tuple[str, ...]
    folder: str
    dry_run: bool
    deadline_hours: float | None = None
    objective: float | None = None
    """The number that a sweeper optimizes; None for a job that failed."""
    exit_code: int = 0
    reason: str = ""
    """The reason of a failure; empty for a job that did not fail."""

    def write(self, sweep: Path, number: int) -> None:
        """Write the file of this job, the one with this ``number``, in the folder of its sweep."""
        file = sweep / _JOBS / f"{number}.json"
        file.parent.mkdir(exist_ok=True)
        replace_text(file, json.dumps(asdict(self), indent=1))

    def outcome(self) -> SweepOutcome:
        """Return the plan of a dry run, or why there is none."""
        if self.reason:
            return SweepOutcome(self.overrides, None, reason=self.reason)
        folder = Path(self.folder)
        return SweepOutcome(self.overrides, read_plan(folder / "plan.json"), self.deadline_hours, folder=folder)


def read_jobs(sweep: Path) -> list[Job]:
    """Return the jobs of the sweep in this folder that have ended, in their order."""
    files = sorted((sweep / _JOBS).glob("*.json"), key=lambda file: int(file.stem))
    contents = [json.loads(file.read_text("utf-8")) for file in files]
    return [Job(**content | {"overrides": tuple(content["overrides"])}) for content in contents]
