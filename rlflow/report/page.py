"""Pages that are one file each and load nothing: a template with its parts and the figures that its script draws."""

import json
import re
from importlib.resources import files
from typing import Any

from rlflow.compiler.facts import format_seconds
from rlflow.compiler.plan import format_duration

# Seconds. Longer times are in minutes, hours or days.
_LONG = 600.0


def build_page(template: str, figures: Any, *scripts: str) -> str:
    """Return the page of a template, a file of this folder: each ``{{name}}`` is replaced by the file of that name.

    ``{{figures}}`` is replaced by the figures as JSON. More ``scripts`` of this folder run at the end.
    """
    page = re.sub(r"\{\{(?!figures)([\w./]+)\}\}", lambda found: _read(found[1]), _read(template))
    page += "".join(f"<script>{_read(name)}</script>" for name in scripts)
    # A script element ends at the first "</", whatever its type.
    return page.replace("{{figures}}", json.dumps(figures).replace("<", "\\u003c"))


def format_time(seconds: float) -> str:
    """Format a time: seconds below ten minutes, then minutes, hours or days."""
    return format_seconds(seconds) if seconds < _LONG else format_duration(seconds)


def format_range(seconds: float, around: tuple[float, float]) -> str:
    """Format a time with the range around it: "97.6 s (72.2 s to 239 s)"."""
    show = format_seconds if seconds < _LONG else format_duration
    return f"{show(seconds)} ({show(around[0])} to {show(around[1])})"


def _read(name: str) -> str:
    return files("rlflow.report").joinpath(name).read_text("utf-8")
