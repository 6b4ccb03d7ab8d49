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
    try:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        raise RecipeError(
            path, f"no metrics.jsonl of a run in '{folder}'", fix="the folder of a run, a number of tokens, or auto"
        ) from None


def _lengths(line: Mapping[str, float]) -> list[float]:
    """Ten of one step, between its quantiles; the last is its longest."""
    node = next((key.removesuffix("/length_p50") for key in line if key.endswith("/length_p50")), None)
    if node is None:
        return []
    known = [line[f"{node}/length_p{quantile}"] for quantile in QUANTILES]
    longest = line[f"{node}/length_max"]
    between = np.interp(_POINTS, (*QUANTILES, 100), (*known, longest))
    return [*map(float, between[:-1]), float(longest)]
