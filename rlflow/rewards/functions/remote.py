"""What a service of your own says, over HTTP.

Asked is ``POST url`` with ``{"texts": [...], "rows": [...]}``, answered ``{"rewards": [...]}``: for each response a
number, or ``{"error": "why not"}``.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlflow.rewards.base import Failure, Outcome, Row, batched
from rlflow.rewards.http import Url, post


@batched(32)
def reward(texts: Sequence[str], rows: Sequence[Row], *, url: Url, timeout_s: float) -> list[Outcome]:
    """A row's values that JSON does not know are sent as texts."""
    answer = post(url, {"texts": list(texts), "rows": [dict(row) for row in rows]}, timeout_s)
    if isinstance(answer, Failure):
        return [answer] * len(texts)
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != len(texts):
        fact = f"got no 'rewards', one for each of {len(texts)} responses, from {url}, but {str(answer)[:80]}"
        return [Failure("invalid", fact)] * len(texts)
    return [_outcome(reward, url) for reward in rewards]


def _outcome(given: Any, url: str) -> Outcome:
    if isinstance(given, int | float) and not isinstance(given, bool):
        with suppress(OverflowError):
            return float(given)
    if isinstance(given, dict) and "error" in given:
        return Failure("unavailable", f"was told by {url}: {str(given['error'])[:200]}")
    return Failure("invalid", f"got {str(given)[:80]} for a response from {url}")
