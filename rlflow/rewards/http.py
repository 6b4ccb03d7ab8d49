"""Posts JSON to a service and retries where that may help."""

import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Annotated, Any

from pydantic import Field

from rlflow.errors import RecipeError, first_line
from rlflow.rewards.base import Failure

_MAX_TRIES = 5
_FIRST_WAIT_S = 0.25
# A later try may succeed after these: too many requests, too early, too slow, or a temporary server error.
_RETRY_CODES = frozenset({408, 425, 429, *range(500, 600)} - {501, 505})
_MAX_RESPONSE_BYTES = 64 * 2**20


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Url = Annotated[str, Field(pattern="^https?://")]


def check_variable(path: str, name: str) -> None:
    """Raise RecipeError for what cannot be the name of an environment variable that holds a key."""
    if not _VARIABLE.fullmatch(name):
        # The value is not shown, because it may be the key.
        fact = "expected the name of an environment variable: letters, digits and '_'"
        raise RecipeError(path, fact, fix="store the key in a variable, and write its name: OPENAI_API_KEY")


def key_headers(variable: str) -> dict[str, str]:
    """Return the headers with the key in an environment variable; none without it."""
    key = os.environ.get(variable)
    return {"Authorization": f"Bearer {key}"} if key else {}


def post(url: str, body: Mapping[str, Any], timeout_s: float, headers: Mapping[str, str] | None = None) -> Any:
    """Return the JSON that the service answers, or a Failure.

    No try starts after ``timeout_s``; the wait between two tries doubles each time. The remaining time is the timeout
    of each connection and each read, so a service with several addresses, or one that answers byte by byte, may take
    longer.
    """
    content = json.dumps(body, default=str).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json", **(headers or {})})
    deadline, wait_s = time.monotonic() + timeout_s, _FIRST_WAIT_S
    for num_tries in range(1, _MAX_TRIES + 1):
        try:
            with urllib.request.urlopen(request, timeout=max(0.001, deadline - time.monotonic())) as response:
                return _parse_json(url, response.read(_MAX_RESPONSE_BYTES + 1))
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.reason}"
            is_final = error.code not in _RETRY_CODES
            error.close()
        except (OSError, HTTPException) as error:
            problem, is_final = first_line(getattr(error, "reason", None) or error), False
        # Random, so that clients do not all return at the same moment when the service is back.
        pause = wait_s * random.uniform(0.5, 1)
        wait_s *= 2
        if is_final or num_tries == _MAX_TRIES or time.monotonic() + pause >= deadline:
            break
        time.sleep(pause)
    tries = f"{num_tries} {'try' if num_tries == 1 else 'tries'}"
    return Failure("unavailable", f"got no answer from {url} ({problem}; {tries})")


def _parse_json(url: str, content: bytes) -> Any:
    if len(content) > _MAX_RESPONSE_BYTES:
        return Failure("invalid", f"got more than {_MAX_RESPONSE_BYTES} bytes from {url}")
    try:
        return json.loads(content)
    except ValueError:
        return Failure("invalid", f"expected JSON from {url}, got {content[:80]!r}")
