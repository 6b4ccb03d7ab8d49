"""Rows as tokens: prompts within their limit, and responses with the end token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from rlflow.batch import Packed
from rlflow.data.messages import is_conversation, response_text, with_instructions
from rlflow.errors import RecipeError, did_you_mean, first_line
from rlflow.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rows = Sequence[Mapping[str, Any]]
Split = Literal["split", "eval_split"]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Encoded:
    """The rows of a split that are used, and their tokens."""

    rows: Rows
    prompt_ids: Packed
    responses: tuple[Packed, ...]
    """For each column that was asked for."""
    warnings: tuple[str, ...] = ()


def encode(
    data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows, split: Split, responses: Sequence[str]
) -> Encoded:
    """Encode the prompts of all rows, and the ``responses``, which are names of columns. Raises RecipeError."""
    if not rows:
        none = Packed.from_rows([], np.int32)
        return Encoded(rows, none, (none,) * len(responses))
    prompt_ids = _encode_prompts(data, tokenizer, rows)
    columns = tuple(_encode_responses(data, tokenizer, rows, name) for name in responses)
    return _within_limit(data, split, Encoded(rows, prompt_ids, columns))


def no_column(data: Data, path: str, column: str, row: Mapping[str, Any]) -> RecipeError:
    """Return the error for a column that the data does not have; ``path`` is the place in the recipe that names it."""
    fix = did_you_mean(column, row) or f"name the right one: {path}=COLUMN"
    return RecipeError(path, f"no column '{column}' in '{data.source}'", known=sorted(row), fix=fix)


def _within_limit(data: Data, split: Split, encoded: Encoded) -> Encoded:
    """Do with prompts that are too long what ``data.overlong`` says. Raises RecipeError."""
    ids, limit = encoded.prompt_ids, data.max_prompt_tokens
    is_short = ids.lengths <= limit
    too_long, total = int((~is_short).sum()), len(ids)
    if not too_long:
        return encoded
    if data.overlong == "error":
        row = int(ids.lengths.argmax())
        raise RecipeError(
            "data.max_prompt_tokens",
            f"the prompt of row {row} of '{data.source}' has {ids.lengths[row]} tokens, not {limit} at most, "
            f"and {too_long} of {total} prompts are too long",
            fix=f"data.max_prompt_tokens={ids.lengths[row]}, data.overlong=drop or data.overlong=truncate_left",
        )
    fact = f"{too_long} of {total} prompts of '{getattr(data, split)}' are longer than {limit} tokens"
    if data.overlong == "truncate_left":
        cut = Packed.from_rows([ids[row][-limit:] for row in range(total)], np.int32)
        warning = f"data.overlong: {fact}, and begin with the last {limit}"
        return Encoded(encoded.rows, cut, encoded.responses, (warning,))
    kept = np.flatnonzero(is_short)
    if not kept.size:
        raise RecipeError(
            "data.overlong",
            f"every prompt of '{getattr(data, split)}' of '{data.source}' is longer than {limit} tokens",
            fix=f"data.max_prompt_tokens={ids.lengths.max()}",
        )
    return Encoded(
        [encoded.rows[int(row)] for row in kept],
        ids.take(kept),
        tuple(column.take(kept) for column in encoded.responses),
        (f"data.overlong: {fact}, and are left out",),
    )


def _column(data: Data, rows: Rows, name: str) -> list[Any]:
    if name not in rows[0]:
        raise no_column(data, f"data.columns.{name}", name, rows[0])
    values = [row.get(name) for row in rows]
    if None in values:
        raise _unusable(data, values.index(None), f"has no '{name}'")
    return values


def _unusable(data: Data, row: int, fact: str) -> RecipeError:
    return RecipeError("data.source", f"row {row} of '{data.source}' {fact}", fix="leave it out")


def _encode_prompts(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows) -> Packed:
    column = _column(data, rows, "prompt")
    if [] in column:
        raise _unusable(data, column.index([]), "has no message before the assistant's")
    if tokenizer.chat_template:
        for row, prompt in enumerate(column):
            if not isinstance(prompt, str | int | float) and not is_conversation(prompt):
                raise _unusable(
                    data, row, "has a prompt that is neither a text nor a list of messages with a 'role' each"
                )
        texts = _guarded(data, lambda: [_chat(data, tokenizer, prompt) for prompt in column])
        encoded = _guarded(data, lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
    elif any(not isinstance(prompt, str) for prompt in column):
        raise RecipeError(
            "data.columns.prompt",
            "prompts are not texts, and the tokenizer has no chat template",
            fix="a column of texts",
        )
    else:
        encoded = _guarded(data, lambda: tokenizer(column)["input_ids"])
    packed = Packed.from_rows(encoded, np.int32)
    if (empty := np.flatnonzero(packed.lengths == 0)).size:
        raise _unusable(data, int(empty[0]), "has an empty prompt")
    return packed


def _encode_responses(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows, name: str) -> Packed:
    """Encode each response with the end token behind it."""
    if (end := tokenizer.eos_token_id) is None:
        raise RecipeError("models", "the tokenizer has no end token, which responses are to learn", fix="set one")
    texts = [response_text(response) for response in _column(data, rows, name)]
    if None in texts:
        fact = f"has a '{name}' that is neither a text nor a conversation that ends with an assistant's text"
        raise _unusable(data, texts.index(None), fact)
    encoded = _guarded(data, lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
    return Packed.from_rows([[*ids, end] for ids in encoded], np.int32)


def _chat(data: Data, tokenizer: "PreTrainedTokenizerBase", prompt: Any) -> str:
    conversation = prompt if is_conversation(prompt) else [{"role": "user", "content": str(prompt)}]
    messages = with_instructions(conversation, data.system_prompt)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _guarded(data: Data, encode: Callable[[], T]) -> T:
    """Turn an error of a tokenizer or a chat template into a RecipeError."""
    try:
        return encode()
    except Exception as error:  # templates and tokenizers have no base of their own
        raise RecipeError(
            "data.source",
            f"the tokenizer refuses a text of '{data.source}' ({first_line(error)})",
            fix="leave such rows out, or data.system_prompt=null for a template that knows no system",
        ) from None
