"""The options of the command line that do not belong to a recipe; some of them are those of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt

from rlflow.schema import Count, Section

# A run with ``tune`` adjusts the sizes that its recipe leaves open; "adaptive" keeps tuning them throughout the run.
Tune = bool | Literal["adaptive"]
# The steps of a run that are traced, counted from 1: all, none, or some.
Trace = bool | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Section):
    """The options of a run that leave its experiment as it is: what it tunes and records."""

    tune: Tune = False
    """Find faster micro-batches and sequence counts in the first steps; ``adaptive``: in all steps."""
    trace: Trace = False
    """Write trace.json, a timeline of every node on every worker; ``[3,4]``: of these steps alone."""
    profile: tuple[Count, ...] = ()
    """The steps in which torch's profiler records the operations of all engines; the traces are in profiles/."""


@dataclass(frozen=True, kw_only=True)
class CommandOptions(RunOptions):
    """The keys of the configuration that do not belong to the recipe."""

    cluster: Mapping[str, Any]
    """A shape such as ``2x8@h200``, ``auto``, ``local``, or a file in ``conf/cluster`` with the keys below."""
    dry_run: bool
    """Print the plan and stop."""
    plan: str | None
    """A plan.json to run in place of a recipe."""
    resume: bool | str
    """The folder of a run to continue; true: the last run of this recipe."""
    explain: bool
    """Show more of the plan: the graph, all alternatives and limits."""
    calibration: str | None
    """A YAML file with measured efficiencies for each kind of GPU, or the folder of a finished run."""
    deadline_hours: Annotated[float, Gt(0)] | None = None
    """The hours in which the run should be finished: a sweep ranks those that are by cost."""
