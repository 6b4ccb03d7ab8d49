"""Rewards from a service of your own, over HTTP.

The request is ``POST url`` with ``{"texts": [...], "rows": [...]}``. The service answers ``{"rewards": [...]}`` with a
number, or ``{"error": "the reason"}``, for each response.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlflow.rewards.base import Failure, Outcome, Row, batched
from rlflow.rewards.http import Url, post


@batched(32)
def reward(texts: Sequence[str], rows: Sequence[Row], *, url: Url, timeout_s: float) -> list[Outcome]:
    """Request the rewards of all responses from ``url`` at once. Values that JSON cannot hold are sent as text."""
    answer = post(url, {"texts": list(texts), "rows": [dict(row) for row in rows]}, timeout_s)
    if isinstance(answer, Failure):
        return [answer] * len(texts)
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != len(texts):
        fact = f"expected 'rewards' for {len(texts)} responses from {url}, got {str(answer)[:80]}"
        return [Failure("invalid", fact)] * len(texts)
    return [_to_outcome(reward, url) for reward in rewards]


def _to_outcome(value: Any, url: str) -> Outcome:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    if isinstance(value, dict) and "error" in value:
        return Failure("unavailable", f"got an error from {url}: {str(value['error'])[:200]}")
    return Failure("invalid", f"expected a number from {url}, got {str(value)[:80]}")
