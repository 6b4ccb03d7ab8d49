"""Reads fields of requests that all forms share."""

from collections.abc import Mapping
from typing import Any

from rlflow.agents.endpoint.errors import ApiError

Body = Mapping[str, Any]


def check(condition: object, fact: str) -> None:
    """Raise ApiError with a fact unless the condition holds."""
    if not condition:
        raise ApiError(fact)


def read_limit(limit: Any) -> int | None:
    """Return the limit of a reply in tokens. Raises ApiError."""
    check(limit is None or (type(limit) is int and limit >= 1), "the limit of tokens must be an integer of at least 1")
    return None if limit is None else int(limit)


def read_stop(stop: Any) -> list[str]:
    """Return the stop texts. Raises ApiError."""
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    is_valid = isinstance(texts, list) and len(texts) <= 64 and all(isinstance(text, str) and text for text in texts)
    check(is_valid, "the stop texts must be texts")
    return list(texts)


def read_content(content: Any) -> str:
    """Return the text of a message. Raises ApiError for anything else."""
    parts = content if isinstance(content, list) else [content or ""]
    texts = [part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part for part in parts]
    check(all(isinstance(text, str) for text in texts), "a message must be text")
    return "".join(texts)


def read_ids(ids: Any, num_tokens: int) -> list[int]:
    """Return the tokens of a prompt. Raises ApiError."""
    check(isinstance(ids, list) and ids, "the prompt must be a list of tokens")
    check(all(type(token) is int and 0 <= token < num_tokens for token in ids), f"tokens are 0 to {num_tokens - 1}")
    return list(ids)
