"""Encodes the responses of rows: a text each, or all turns of the assistant in a conversation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlflow.batch import Packed
from rlflow.data.chat_template import TemplateError, format_chat, render_all
from rlflow.data.messages import Message, as_conversation, is_conversation, response_text
from rlflow.data.mistakes import Rows, column_of, converted_errors, fix_for_texts, row_error
from rlflow.errors import RecipeError
from rlflow.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_responses(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows, name: str) -> Packed:
    """Encode each response, followed by the end token."""
    end = _end_token(tokenizer)
    texts = [response_text(response) for response in column_of(data, rows, name)]
    if None in texts:
        fact = f"has a '{name}' that is neither a text nor a conversation that ends with an assistant's text"
        raise row_error(data, texts.index(None), fact)
    encoded = converted_errors(data, lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
    return Packed.from_rows([[*ids, end] for ids in encoded], np.int32)


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant."""

    row: int
    text: str
    before: Sequence[Message]
    """The messages before it."""


def encode_turns(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows) -> tuple[Packed, Packed]:
    """Encode conversations from the assistant's first turn on; return tokens, and which of them are trained on.

    These are the texts of the assistant's turns, each followed by the end token. The others are what the chat template
    writes between two turns.
    """
    end = _end_token(tokenizer)
    turns = list(_assistant_turns(data, rows))
    texts = [*_texts_before(data, tokenizer, turns), *(turn.text for turn in turns)]
    encoded = converted_errors(data, lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
    ids: list[list[int]] = [[] for _ in rows]
    trained: list[list[bool]] = [[] for _ in rows]
    for turn, before, text in zip(turns, encoded[: len(turns)], encoded[len(turns) :], strict=True):
        ids[turn.row] += [*before, *text, end]
        trained[turn.row] += [False] * len(before) + [True] * (len(text) + 1)
    return Packed.from_rows(ids, np.int32), Packed.from_rows(trained, np.bool_)


def _assistant_turns(data: Data, rows: Rows) -> Iterator[_Turn]:
    columns = (column_of(data, rows, name) for name in ("prompt", "response"))
    for row, (prompt, response) in enumerate(zip(*columns, strict=True)):
        first = as_conversation(prompt)
        rest = response if is_conversation(response) else [{"role": "assistant", "content": response}]
        messages = [*first, *rest]
        for place in range(len(first), len(messages)):
            if messages[place]["role"] == "assistant":
                if (text := response_text(messages[place : place + 1])) is None:
                    raise row_error(data, row, "has a turn of the assistant whose content is not a text")
                yield _Turn(row, text, messages[:place])


def _texts_before(data: Data, tokenizer: "PreTrainedTokenizerBase", turns: Sequence[_Turn]) -> list[str]:
    """Return the text before each turn and after the one before it; none before a row's first, whose prompt has it."""
    texts = [""] * len(turns)
    later = [number for number in range(1, len(turns)) if turns[number].row == turns[number - 1].row]
    prefixes = {place: turns[place].before for number in later for place in (number - 1, number)}
    try:
        rows = [turns[place].row for place in prefixes]
        rendered = render_all(lambda prefix: format_chat(data, tokenizer, prefix), list(prefixes.values()), rows)
    except TemplateError as error:
        fact = f"the tokenizer's chat template {error} of '{data.source}'"
        raise RecipeError("data.source", fact, fix=fix_for_texts(data)) from None
    text_of = dict(zip(prefixes, rendered, strict=True))
    for number in later:
        written = f"{text_of[number - 1]}{turns[number - 1].text}{tokenizer.eos_token}"
        if not text_of[number].startswith(written):
            fact = "has turns that the chat template changes once others follow, or does not end with the end token"
            raise row_error(data, turns[number].row, fact, fix="data.train_on=last, or another chat template")
        texts[number] = text_of[number].removeprefix(written)
    return texts


def _end_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    if (end := tokenizer.eos_token_id) is None:
        raise RecipeError(
            "models", "the tokenizer has no end token, which responses need", fix="use a tokenizer with an eos_token"
        )
    return int(end)
