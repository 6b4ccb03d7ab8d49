"""Conversations as lists of messages: where the prompt ends, and what the response is."""

from collections.abc import Mapping, Sequence
from typing import Any

# Either name gives the model its instructions before the user's first turn.
_INSTRUCTIONS = ("system", "developer")


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages with a role each."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def split_answers(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the rows with prompts that end before the answer.

    Rows for supervised training have a whole conversation in ``messages``, which is the prompt where there is no other.
    A conversation that ends with the assistant's turn is the prompt up to that turn, and the turn is the row's
    ``response`` unless it has one.
    """
    return [_split(row) for row in rows]


def _split(row: Mapping[str, Any]) -> Mapping[str, Any]:
    conversation = row.get("prompt", row.get("messages"))
    if not is_conversation(conversation):
        return row
    if conversation[-1]["role"] != "assistant":
        return {**row, "prompt": conversation}
    return {"response": conversation[-1:], **row, "prompt": conversation[:-1]}


def with_instructions(conversation: Sequence[Mapping[str, Any]], system_prompt: str | None) -> list[Mapping[str, Any]]:
    """Return the conversation with the system prompt before it, unless it has one of its own."""
    if system_prompt is None or (conversation and conversation[0]["role"] in _INSTRUCTIONS):
        return list(conversation)
    return [{"role": "system", "content": system_prompt}, *conversation]


def response_text(response: Any) -> str | None:
    """Return a response's text, the last turn of a conversation that ends with the assistant's; None where it has none.

    A number is a text as well.
    """
    if isinstance(response, list):
        last = response[-1] if response and isinstance(response[-1], Mapping) else {}
        response = last.get("content") if last.get("role", "assistant") == "assistant" else None
        return response if isinstance(response, str) else None
    return str(response) if isinstance(response, str | int | float) else None
