"""1 if the whole response matches a pattern; 0 otherwise."""

import re
from collections.abc import Sequence

from rlflow.rewards.base import Row, batched


@batched(64)
def reward(texts: Sequence[str], rows: Sequence[Row], *, pattern: re.Pattern[str]) -> list[float]:
    """Match each response with ``pattern``, a Python regular expression.

    A dot matches line breaks only in a pattern that starts with ``(?s)``.
    """
    return [float(pattern.fullmatch(text) is not None) for text in texts]
