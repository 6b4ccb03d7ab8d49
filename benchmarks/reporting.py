"""The end of every benchmark: figures compared with goals."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Goal:
    text: str
    """As printed: ``at least 3``."""
    is_met: bool


def finish(name: str, figures: Mapping[str, float | bool], goals: Mapping[str, Goal], json_file: Path | None) -> int:
    """Write the figures, print each with its goal, and return the exit code: 1 when a goal is missed."""
    if json_file is not None:
        json_file.write_text(json.dumps({"figures": dict(figures)}, indent=1))
    texts = [f"{figure} {_format(value)} ({goals[figure].text})" for figure, value in figures.items()]
    print(f"{name}: {', '.join(texts)}")
    return 0 if all(goal.is_met for goal in goals.values()) else 1


def _format(value: float | bool) -> str:
    if isinstance(value, bool):
        return str(value)
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"
