"""Files with a line of JSON a step, of which a resumed run does the last steps again."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the objects in the file, without lines that are not JSON objects, as the half line of a killed run."""
    parsed = [_parsed(line) for line in path.read_text(errors="replace").splitlines()]
    return [line for line in parsed if line is not None]


def keep_until(path: Path, step: int) -> None:
    """Remove the lines of later steps than ``step``, and those that are not JSON objects with a step."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    beside = path.with_suffix(".writing")
    beside.write_text("".join(f"{line}\n" for line in lines if _step_of(line) <= step))
    beside.rename(path)


def _step_of(line: str) -> float:
    """Return the step of a line; infinity where it has none."""
    step = (_parsed(line) or {}).get("step")
    return step if isinstance(step, int) else math.inf


def _parsed(line: str) -> Mapping[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
