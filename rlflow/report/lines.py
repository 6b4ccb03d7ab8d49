"""Files with a line of JSON a step, of which a resumed run does the last steps again."""

import json
import math
from pathlib import Path


def keep_until(path: Path, step: int) -> None:
    """Leaves what is of the steps up to ``step``, and no half line."""
    lines = path.read_text().splitlines() if path.exists() else []
    beside = path.with_suffix(".writing")
    beside.write_text("".join(f"{line}\n" for line in lines if _step_of(line) <= step))
    beside.rename(path)


def _step_of(line: str) -> float:
    """Infinite for half a line."""
    try:
        step: int = json.loads(line)["step"]
    except (ValueError, KeyError):
        return math.inf
    return step
