"""The names of metrics that docs/metrics.md explains."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_ROWS = re.findall(r"^\| (`[^|]*)\|", (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(), re.MULTILINE)
_NAMES = [name for row in _ROWS for name in re.findall(r"`([\w/]+)`", row)]


def unexplained(lines: Iterable[Mapping[str, float]]) -> set[str]:
    """Return the metrics in lines of metrics.jsonl that the page does not explain.

    Recipes choose the names of nodes, so only the last part of a name counts, unless it stands for a node itself.
    """
    lasts = [name if name.endswith("/NODE") else name.rpartition("/")[2] for name in _NAMES]
    patterns = [re.sub("[A-Z]+", r"\\w+", last) for last in lasts]
    explained = re.compile("|".join(rf".*{each}" if each.startswith("_") else rf"(.+/)?{each}" for each in patterns))
    return {name for line in lines for name in line if name != "step" and not explained.fullmatch(name)}
