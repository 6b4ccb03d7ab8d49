"""Response lengths as a past run measured them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlflow.errors import RecipeError

QUANTILES = (10, 50, 90)
"""In hundredths, that a run writes of the response lengths of every step, as ``length_p10`` and so on."""
_STEPS = 20
_POINTS = np.arange(5, 100, 10)


def lengths_of_run(folder: str, path: str) -> tuple[float, ...]:
    """Equally likely lengths, from the last steps of the run in ``folder``, which the recipe names at ``path``.

    Raises RecipeError for a folder without such a run.
    """
    steps = [lengths for line in _lines(Path(folder), path) if (lengths := _lengths(line))]
    if not steps:
        raise RecipeError(
            path, f"the run in '{folder}' has no response lengths", fix="a run that generates, or numbers"
        )
    return tuple(sorted(length for lengths in steps[-_STEPS:] for length in lengths))


def _lines(folder: Path, path: str) -> list[Mapping[str, float]]:
    """Return the lines of the run's metrics, without the last one where a killed run has left half of it.

    Raises RecipeError for a file that is missing, and for a line that holds anything else.
    """
    file = folder / "metrics.jsonl"
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError):
        raise RecipeError(
            path, f"no metrics.jsonl of a run in '{folder}'", fix="the folder of a run, a number of tokens, or auto"
        ) from None
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()
    parsed = []
    for number, line in enumerate(lines, 1):
        metrics = _metrics(line)
        if metrics is None:
            fix = f"remove line {number} of '{file}', or name another run"
            raise RecipeError(path, f"line {number} of '{file}' does not hold the metrics of a step", fix=fix)
        parsed.append(metrics)
    return parsed


def _metrics(line: str) -> Mapping[str, float] | None:
    """Return the numbers of a step by their names; None for a line that holds anything else."""
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(metrics, dict) or any(type(value) not in (int, float) for value in metrics.values()):
        return None
    nodes = [name.removesuffix("/length_p50") for name in metrics if name.endswith("/length_p50")]
    expected = [*(f"length_p{quantile}" for quantile in QUANTILES), "length_max"]
    return metrics if all(f"{node}/{name}" in metrics for node in nodes for name in expected) else None


def _lengths(line: Mapping[str, float]) -> list[float]:
    """Ten of one step, between its quantiles; the last is its longest."""
    node = next((key.removesuffix("/length_p50") for key in line if key.endswith("/length_p50")), None)
    if node is None:
        return []
    known = [line[f"{node}/length_p{quantile}"] for quantile in QUANTILES]
    longest = line[f"{node}/length_max"]
    between = np.interp(_POINTS, (*QUANTILES, 100), (*known, longest))
    return [*map(float, between[:-1]), float(longest)]
