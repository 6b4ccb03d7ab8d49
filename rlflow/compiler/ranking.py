"""The plans of a sweep side by side, the best first."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.compiler.render import seconds
from rlflow.resources.planner.prediction import Prediction


@dataclass(frozen=True)
class Outcome:
    """Of one job of a sweep."""

    overrides: tuple[str, ...]
    prediction: Prediction | None
    """None: nothing fits."""
    reason: str = ""
    """Why not."""


def _short(override: str) -> str:
    """Return an override with the last part of its key, and of the path to a recipe."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value.strip(chr(39)).rpartition('/')[2]}"


def ranking(outcomes: Sequence[Outcome]) -> RenderableType:
    """By step time; what does not fit stands last, and below it why. Overrides that all jobs have are left out."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in ("sweep", "fits", "step", "tokens/s\nper GPU", "GPU-hours per\n1000 steps", "headroom"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "sweep")
    everywhere = set(outcomes[0].overrides).intersection(*(outcome.overrides for outcome in outcomes))
    far = float("inf")
    reasons: list[Text] = []
    for outcome in sorted(outcomes, key=lambda o: (o.prediction.step_seconds if o.prediction else far, o.overrides)):
        own = ", ".join(_short(each) for each in outcome.overrides if each not in everywhere)
        found = outcome.prediction
        if found is None:
            table.add_row(own, "no")
            reasons.append(Text(f"{own}: {outcome.reason}."))
            continue
        table.add_row(
            own,
            "yes",
            seconds(found.step_seconds),
            f"{found.tokens_per_second_per_gpu:.0f}",
            f"{found.num_gpus * found.step_seconds * 1000 / 3600:.0f}",
            f"{found.headroom_gib:.1f} GiB" if found.headroom_gib is not None else "-",
        )
    return Group(table, Text(), *reasons) if reasons else table
