"""Conversations as lists of messages: where the prompt ends, and what the response is.

Rows as tokens: prompts within their limit, and responses with the end token.

Prompts with a chosen and a rejected response.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Pairs
from rlflow.errors import RecipeError, did_you_mean, first_line
from rlflow.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def pairs_of(keys: NDArray[np.int64], prompt_ids: Packed, chosen_ids: Packed, rejected_ids: Packed) -> Pairs:
    """From a row of each a pair: ``keys`` [P, 3] are those of the prompts."""
    both = np.repeat(np.arange(len(keys)), 2)
    pair_keys = keys[both]
    pair_keys[1::2, 2] = 1
    # Chosen ones first, which are then taken in turn with the others.
    turns = np.arange(2 * len(keys)).reshape(2, -1).T.ravel()
    return Pairs(
        keys=pair_keys,
        prompt_ids=prompt_ids.take(both),
        response_ids=Packed.concatenate([chosen_ids, rejected_ids]).take(turns),
    )
