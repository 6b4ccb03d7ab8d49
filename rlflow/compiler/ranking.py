"""The plans of a sweep as a table, the fastest first."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.compiler.render import format_seconds
from rlflow.resources.planner.prediction import Prediction


@dataclass(frozen=True)
class SweepOutcome:
    """The plan of one job of a sweep, or why there is none."""

    overrides: tuple[str, ...]
    prediction: Prediction | None
    """None if the job does not fit the cluster."""
    reason: str = ""
    """Why it does not fit."""


def ranking_table(outcomes: Sequence[SweepOutcome]) -> RenderableType:
    """Return a table of the jobs by step time. Jobs that do not fit come last, with the reasons below the table.

    Overrides that all jobs share are left out.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in ("sweep", "fits", "step", "tokens/s\nper GPU", "GPU-hours per\n1000 steps", "headroom"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "sweep")
    everywhere = set(outcomes[0].overrides).intersection(*(outcome.overrides for outcome in outcomes))
    far = float("inf")
    reasons: list[Text] = []
    for outcome in sorted(outcomes, key=lambda o: (o.prediction.step_seconds if o.prediction else far, o.overrides)):
        own = ", ".join(_short(each) for each in outcome.overrides if each not in everywhere)
        prediction = outcome.prediction
        if prediction is None:
            table.add_row(own, "no")
            reasons.append(Text(f"{own}: {outcome.reason}."))
            continue
        table.add_row(
            own,
            "yes",
            format_seconds(prediction.step_seconds),
            f"{prediction.tokens_per_second_per_gpu:.0f}",
            f"{prediction.num_gpus * prediction.step_seconds * 1000 / 3600:.0f}",
            f"{prediction.headroom_gib:.1f} GiB" if prediction.headroom_gib is not None else "-",
        )
    return Group(table, Text(), *reasons) if reasons else table


def _short(override: str) -> str:
    """Return an override with the last part of its key, and of the path to a recipe."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value.strip(chr(39)).rpartition('/')[2]}"
