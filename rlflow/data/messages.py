"""Conversations in rows of a data set: the forms in which files have them, and the prompts and responses in them.

A conversation is a list of messages with a ``role`` and a ``content``. Three other forms are converted to it: messages
of ShareGPT, which have ``from`` and ``value``; contents that are lists of parts; and pairs of texts whose turns begin
with ``Human:`` and ``Assistant:``. In a row with images, parts that stand for one become ``<image>`` in the text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Row = Mapping[str, Any]
Message = Mapping[str, Any]

IMAGE_TAG = "<image>"
"""The place of an image in a text."""
# The fields of a part of a message that has an image, or its address, in it.
_IMAGE_FIELDS = ("image", "image_url", "url", "path", "bytes", "source")
# The roles of a message with instructions before the user's first turn.
_INSTRUCTION_ROLES = ("system", "developer")
# The roles of ShareGPT's messages.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_COLUMNS = ("prompt", "messages", "conversations", "response", "chosen", "rejected")
# A turn of a text, as in hh-rlhf.
_TURN = re.compile(r"\n\n(Human|Assistant): ?")


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages that have a role."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def as_conversation(prompt: Any) -> Sequence[Message]:
    """Return a prompt as messages: a text is one of the user."""
    return prompt if is_conversation(prompt) else [{"role": "user", "content": str(prompt)}]


def split_answers(rows: Sequence[Row], train_on: Literal["last", "all"] = "last") -> Sequence[Row]:
    """Return the rows with prompts that end before the assistant's last turn, or with ``all`` before its first.

    Rows for supervised training have a conversation in ``messages`` or ``conversations``, which becomes the prompt if
    there is no other. The rest of a conversation that ends with the assistant becomes the row's ``response``, unless it
    has one. Pairs without a prompt have it as the common beginning of both conversations.
    """
    return [_split(_with_common_prompt(_with_messages(row)), train_on) for row in rows]


def _with_messages(row: Row) -> Row:
    """Return the row with conversations of all forms as messages."""
    has_images = "images" in row
    read = {name: _messages(row[name], has_images) for name in _COLUMNS if isinstance(row.get(name), list)}
    return {**row, **read} if read else row


def _messages(values: list[Any], has_images: bool) -> list[Any]:
    return [_message(value, has_images) if isinstance(value, Mapping) else value for value in values]


def _message(message: Message, has_images: bool) -> Message:
    if "role" not in message and message.get("from") in _ROLES and "value" in message:
        message = {"role": _ROLES[message["from"]], "content": message["value"]}
    parts = message.get("content")
    if isinstance(parts, list):
        texts = [_part_text(part, has_images) for part in parts]
        if None not in texts:
            return {**message, "content": "".join(map(str, texts))}
    return message


def _part_text(part: Any, has_images: bool) -> str | None:
    """Return the text of a part of a message; None for another kind of part, and for one that holds an image."""
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "text":
        return str(part.get("text", ""))
    stands_for_image = has_images and part.get("type") == "image"
    return IMAGE_TAG if stands_for_image and all(part.get(name) is None for name in _IMAGE_FIELDS) else None


def _with_common_prompt(row: Row) -> Row:
    if "prompt" in row or not {"chosen", "rejected"} <= row.keys():
        return row
    chosen, rejected = _turns(row["chosen"]), _turns(row["rejected"])
    if len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        return row
    return {**row, "prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def _turns(value: Any) -> list[Message]:
    """Return the messages of a conversation or of a text with turns; none of anything else."""
    if is_conversation(value):
        return list(value)
    before, *turns = _TURN.split(value) if isinstance(value, str) else ["?"]
    if before:
        return []
    roles = ("user" if speaker == "Human" else "assistant" for speaker in turns[::2])
    return [{"role": role, "content": text} for role, text in zip(roles, turns[1::2], strict=True)]


def _split(row: Row, train_on: Literal["last", "all"]) -> Row:
    conversation = row.get("prompt", row.get("messages", row.get("conversations")))
    if not is_conversation(conversation):
        return row
    if conversation[-1]["role"] != "assistant":
        return {**row, "prompt": conversation}
    turns = [place for place, message in enumerate(conversation) if message["role"] == "assistant"]
    end = turns[0 if train_on == "all" else -1]
    return {"response": conversation[end:], **row, "prompt": conversation[:end]}


def describe_content(content: Any) -> tuple[str, str]:
    """Return what is wrong with the content of a message that is not a text, and the fix."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image", "image_url"):
            return "has an image inside of a message", "name it in the column 'images', in the order of the parts"
        if kind not in ("text", None):
            return f"has a part of the type '{kind}' in a message, not a text or an image", "remove the row"
    return f"has a message whose content is not a text ({str(content)[:80]})", "remove the row"


def with_instructions(conversation: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """Return the conversation after the system prompt, unless it has instructions of its own."""
    if system_prompt is None or (conversation and conversation[0]["role"] in _INSTRUCTION_ROLES):
        return list(conversation)
    return [{"role": "system", "content": system_prompt}, *conversation]


def response_text(response: Any) -> str | None:
    """Return the text of a response; None if it has none.

    The response is a text, a number, or a conversation that ends with the assistant's turn.
    """
    if isinstance(response, list):
        last = response[-1] if response and isinstance(response[-1], Mapping) else {}
        response = last.get("content") if last.get("role", "assistant") == "assistant" else None
        return response if isinstance(response, str) else None
    return str(response) if isinstance(response, str | int | float) else None
