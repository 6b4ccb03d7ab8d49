"""1 where the whole response has a form."""

import re
from collections.abc import Sequence

from rlflow.rewards.base import Row, batched


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row], *, pattern: re.Pattern[str]) -> list[float]:
    """``pattern``: a regular expression of Python's; with ``(?s)`` before it a dot is any character."""
    return [float(pattern.fullmatch(text) is not None) for text in texts]
