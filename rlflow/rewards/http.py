"""Asking a service, again where that may help."""

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Annotated, Any

from pydantic import Field

from rlflow.errors import first_line
from rlflow.rewards.base import Failure

_TRIES = 5
_FIRST_WAIT_S = 0.25
# Those after which the same question may be answered: too many, too early, too slow, or broken for the moment.
_AGAIN = frozenset({408, 425, 429, *range(500, 600)} - {501, 505})
_MOST_BYTES = 64 * 2**20


Url = Annotated[str, Field(pattern="^https?://")]


def post(url: str, body: Mapping[str, Any], timeout_s: float, headers: Mapping[str, str] | None = None) -> Any:
    """The JSON that the service answers, or a Failure. No try begins after ``timeout_s``, and the waits between them
    are each twice as long as the one before. What is left of the time holds for each address of the service and each
    read from it: one with several addresses, or that answers byte by byte, may take longer."""
    content = json.dumps(body, default=str).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json", **(headers or {})})
    end, wait_s = time.monotonic() + timeout_s, _FIRST_WAIT_S
    for tried in range(1, _TRIES + 1):
        try:
            with urllib.request.urlopen(request, timeout=max(0.001, end - time.monotonic())) as answer:
                return _read(url, answer.read(_MOST_BYTES + 1))
        except urllib.error.HTTPError as error:
            said = f"{error.code} {error.reason}"
            is_final = error.code not in _AGAIN
            error.close()
        except (OSError, HTTPException) as error:
            said, is_final = first_line(getattr(error, "reason", None) or error), False
        # Not all at once when the service is back.
        pause = wait_s * random.uniform(0.5, 1)
        wait_s *= 2
        if is_final or tried == _TRIES or time.monotonic() + pause >= end:
            break
        time.sleep(pause)
    return Failure("unavailable", f"has no answer from {url} ({said}; {tried} {'try' if tried == 1 else 'tries'})")


def _read(url: str, content: bytes) -> Any:
    if len(content) > _MOST_BYTES:
        return Failure("invalid", f"got more than {_MOST_BYTES} bytes from {url}")
    try:
        return json.loads(content)
    except ValueError:
        return Failure("invalid", f"got no JSON from {url}, but {content[:80]!r}")
