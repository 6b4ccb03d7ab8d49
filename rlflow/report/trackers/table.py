"""The table of samples, as all trackers have it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rlflow.batch.sample import Sample

SAMPLES = "samples"
"""The name of the table."""
COLUMNS = [field.name for field in fields(Sample) if field.name not in ("images", "turns", "turn_seconds")]


def rows(samples: Sequence[Sample]) -> list[list[Any]]:
    """Return the cells of samples."""
    return [row(sample.to_dict()) for sample in samples]


def row(sample: Mapping[str, Any]) -> list[Any]:
    """Return the cells of a sample. The parts of its reward are one cell, since samples may have different ones."""
    cells = {**sample, "reward_parts": json.dumps(sample["reward_parts"])}
    return [cells[name] for name in COLUMNS]
