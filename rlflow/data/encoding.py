"""Encodes rows of a data set: conversations become prompts and responses, and both become tokens.

Shapes: P prompts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Pairs
from rlflow.data.chat_template import TemplateError, render_all
from rlflow.data.messages import is_conversation, response_text, with_instructions
from rlflow.errors import RecipeError, did_you_mean, first_line
from rlflow.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MAX_CHARACTERS = 2**23
"""Characters of a prompt that is encoded. A longer one is too long for every model, and would take minutes."""

_MESSAGES_AS_TEXT = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")

Rows = Sequence[Mapping[str, Any]]
Split = Literal["split", "eval_split"]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Encoded:
    """The rows of a split without those that are dropped, and their tokens."""

    rows: Rows
    prompt_ids: Packed
    responses: tuple[Packed, ...]
    """One for each requested column."""
    warnings: tuple[str, ...] = ()


def encode(
    data: Data,
    tokenizer: "PreTrainedTokenizerBase",
    rows: Rows,
    split: Split,
    responses: Sequence[str],
    num_embeddings: int | None = None,
) -> Encoded:
    """Encode the prompts of all rows, and the columns named in ``responses``. Raises RecipeError.

    ``num_embeddings`` is the number of tokens that the model has embeddings for, if it is known.
    """
    if not rows:
        empty = Packed.from_rows([], np.int32)
        return Encoded(rows, empty, (empty,) * len(responses))
    _check_responses(data, rows, responses)
    is_huge = np.array([_num_characters(row.get("prompt")) > _MAX_CHARACTERS for row in rows])
    if is_huge.any() and data.overlong != "drop":
        fact = f"has a prompt of more than {_MAX_CHARACTERS} characters"
        raise _row_error(data, int(is_huge.argmax()), fact, fix="data.overlong=drop, or shorten the prompt")
    # Their first characters stand for these prompts, whose rows are dropped.
    short_rows = [
        {**row, "prompt": _shorten(row["prompt"])} if huge else row for row, huge in zip(rows, is_huge, strict=True)
    ]
    prompt_ids = _encode_prompts(data, tokenizer, short_rows)
    columns = tuple(_encode_responses(data, tokenizer, rows, name) for name in responses)
    if num_embeddings is not None:
        for ids in (prompt_ids, *columns):
            _check_embeddings(data, tokenizer, ids, num_embeddings)
    return _apply_prompt_limit(data, split, Encoded(rows, prompt_ids, columns), is_huge)


def _num_characters(prompt: Any) -> int:
    """Return the characters of a text, or of the messages of a conversation."""
    if is_conversation(prompt):
        return sum(_num_characters(message.get("content")) for message in prompt)
    return len(prompt) if isinstance(prompt, str) else 0


def _shorten(prompt: Any) -> Any:
    """Return a prompt with the first character of its text, or of each text of its messages."""
    if is_conversation(prompt):
        return [{**message, "content": _shorten(message.get("content"))} for message in prompt]
    return prompt[:1] if isinstance(prompt, str) else prompt


def _check_embeddings(data: Data, tokenizer: "PreTrainedTokenizerBase", ids: Packed, num_embeddings: int) -> None:
    """Raise RecipeError for a token that the model has no embedding for: a GPU would name neither token nor row."""
    beyond = np.flatnonzero(ids.values >= num_embeddings)
    if beyond.size:
        row, token = int(np.searchsorted(ids.offsets, beyond[0], side="right")) - 1, int(ids.values[beyond[0]])
        name = tokenizer.convert_ids_to_tokens(token)
        fact = f"has the token '{name}' (id {token}), and the model has embeddings for {num_embeddings} tokens"
        fix = "resize the model's embeddings (resize_token_embeddings in transformers), or remove the token"
        raise _row_error(data, row, fact, fix)


def _check_responses(data: Data, rows: Rows, responses: Sequence[str]) -> None:
    """Raise RecipeError for responses that repeat their prompts. One conversation may hold both."""
    prompts = data.columns.get("prompt", "prompt")
    for name in responses:
        if data.columns.get(name, name) == prompts and not is_conversation(rows[0].get(name)):
            fact = f"prompt and {name} are both '{prompts}', so that each response repeats its prompt"
            raise RecipeError(f"data.columns.{name}", fact, fix=f"name the column of the responses: {name}: COLUMN")


def missing_column_error(data: Data, path: str, column: str, row: Mapping[str, Any]) -> RecipeError:
    """Return the error for a column that the data does not have; ``path`` is the key that names it."""
    fix = did_you_mean(column, row) or f"name the column that the data set has: {path}=COLUMN"
    return RecipeError(path, f"no column '{column}' in '{data.source}'", known=sorted(row), fix=fix)


def _apply_prompt_limit(data: Data, split: Split, encoded: Encoded, is_huge: NDArray[np.bool_]) -> Encoded:
    """Drop or shorten prompts that are too long, or raise RecipeError, as ``data.overlong`` says.

    Huge prompts [P] are too long, whatever tokens stand for them.
    """
    ids, limit = encoded.prompt_ids, data.max_prompt_tokens
    is_short = (ids.lengths <= limit) & ~is_huge
    too_long, total = int((~is_short).sum()), len(ids)
    if not too_long:
        return encoded
    if data.overlong == "error":
        row = int(ids.lengths.argmax())
        raise RecipeError(
            "data.max_prompt_tokens",
            f"expected at most {limit} tokens, got {ids.lengths[row]} in the prompt of row {row} of '{data.source}'; "
            f"{too_long} of {total} prompts are too long",
            fix=f"data.max_prompt_tokens={ids.lengths[row]}, data.overlong=drop or data.overlong=truncate_left",
        )
    fact = f"{too_long} of {total} prompts of '{getattr(data, split)}' are longer than {limit} tokens"
    if data.overlong == "truncate_left":
        cut = Packed.from_rows([ids[row][-limit:] for row in range(total)], np.int32)
        warning = f"data.overlong: {fact}; only their last {limit} tokens are used"
        return Encoded(encoded.rows, cut, encoded.responses, (warning,))
    short = np.flatnonzero(is_short)
    if not short.size:
        raise RecipeError(
            "data.overlong",
            f"every prompt of '{getattr(data, split)}' of '{data.source}' is longer than {limit} tokens",
            fix=f"data.max_prompt_tokens={ids.lengths.max()}",
        )
    return Encoded(
        [encoded.rows[int(row)] for row in short],
        ids.take(short),
        tuple(column.take(short) for column in encoded.responses),
        (f"data.overlong: {fact} and are dropped",),
    )


def _column(data: Data, rows: Rows, name: str) -> list[Any]:
    if name not in rows[0]:
        raise missing_column_error(data, f"data.columns.{name}", name, rows[0])
    values = [row.get(name) for row in rows]
    if None in values:
        row = values.index(None)
        is_pair = name == "prompt" and "chosen" in rows[row]
        more = ", and its chosen and rejected do not begin with the same one" if is_pair else ""
        raise _row_error(data, row, f"has no '{name}'{more}")
    return values


def _row_error(data: Data, row: int, fact: str, fix: str = "remove the row") -> RecipeError:
    return RecipeError("data.source", f"row {row} of '{data.source}' {fact}", fix=fix)


def _encode_prompts(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows) -> Packed:
    column = _column(data, rows, "prompt")
    if [] in column:
        raise _row_error(data, column.index([]), "has no message before the assistant's")
    if data.system_prompt is not None and not tokenizer.chat_template:
        fact = "needs a chat template, and the tokenizer has none"
        fix = "write models.NAME.chat_template, or data.system_prompt=null and instructions in the prompts"
        raise RecipeError("data.system_prompt", fact, fix=fix)
    for row, prompt in enumerate(column):
        if isinstance(prompt, str) and _MESSAGES_AS_TEXT.match(prompt):
            fact = f"has a prompt that is the text of a list of messages ({prompt[:80]})"
            raise _row_error(data, row, fact, fix="save the messages as a list, in a JSON or Parquet file")
    for option in data.template_options:
        # A template ignores arguments that it does not know, so that a wrong name would change nothing.
        if not re.search(rf"\b{re.escape(option)}\b", str(tokenizer.chat_template or "")):
            fact = "the tokenizer's chat template does not read it"
            raise RecipeError(f"data.template_options.{option}", fact, fix="remove it, or correct its name")
    if tokenizer.chat_template:
        for row, prompt in enumerate(column):
            if not isinstance(prompt, str | int | float) and not is_conversation(prompt):
                fact = "has a prompt that is neither a text nor a list of messages with a 'role' each"
                raise _row_error(data, row, f"{fact} ({str(prompt)[:80]})")
            contents = [message.get("content") for message in prompt] if is_conversation(prompt) else ()
            if other := next((content for content in contents if not isinstance(content, str | NoneType)), None):
                raise _row_error(data, row, f"has a message whose content is not a text ({str(other)[:80]})")
        try:
            texts = render_all(partial(_format_chat, data, tokenizer), column)
        except TemplateError as error:
            fact = f"the tokenizer's chat template {error} of '{data.source}'"
            raise RecipeError("data.source", fact, fix=_fix_for_texts(data)) from None
        encoded = _convert_errors(data, lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
    elif any(not isinstance(prompt, str) for prompt in column):
        raise RecipeError(
            "data.columns.prompt",
            "prompts are not texts, and the tokenizer has no chat template",
            fix="a column of texts, or write models.NAME.chat_template",
        )
    else:
        encoded = _convert_errors(data, lambda: tokenizer(column)["input_ids"])
    packed = Packed.from_rows(encoded, np.int32)
    if (empty := np.flatnonzero(packed.lengths == 0)).size:
        raise _row_error(data, int(empty[0]), "has an empty prompt")
    return packed


def _encode_responses(data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows, name: str) -> Packed:
    """Encode each response, followed by the end token."""
    if (end := tokenizer.eos_token_id) is None:
        raise RecipeError(
            "models", "the tokenizer has no end token, which responses need", fix="use a tokenizer with an eos_token"
        )
    texts = [response_text(response) for response in _column(data, rows, name)]
    if None in texts:
        fact = f"has a '{name}' that is neither a text nor a conversation that ends with an assistant's text"
        raise _row_error(data, texts.index(None), fact)
    encoded = _convert_errors(data, lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
    return Packed.from_rows([[*ids, end] for ids in encoded], np.int32)


def _format_chat(data: Data, tokenizer: "PreTrainedTokenizerBase", prompt: Any) -> str:
    conversation = prompt if is_conversation(prompt) else [{"role": "user", "content": str(prompt)}]
    messages = with_instructions(conversation, data.system_prompt)
    options = data.template_options
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


def _fix_for_texts(data: Data) -> str:
    no_system_role = ", or set data.system_prompt=null if the chat template has no system role"
    return "remove such rows" + (no_system_role if data.system_prompt is not None else "")


def _convert_errors(data: Data, encode: Callable[[], T]) -> T:
    """Turn an error of a tokenizer into a RecipeError."""
    try:
        return encode()
    except Exception as error:  # tokenizers raise errors of many kinds
        raise RecipeError(
            "data.source",
            f"the tokenizer refuses a text of '{data.source}' ({first_line(error)})",
            fix=_fix_for_texts(data),
        ) from None


def make_pairs(keys: NDArray[np.int64], prompt_ids: Packed, chosen_ids: Packed, rejected_ids: Packed) -> Pairs:
    """Combine prompts with their chosen and rejected responses; ``keys`` [P, 3] are the keys of the prompts."""
    both = np.repeat(np.arange(len(keys)), 2)
    pair_keys = keys[both]
    pair_keys[1::2, 2] = 1
    # The chosen and the rejected responses alternate.
    alternating = np.arange(2 * len(keys)).reshape(2, -1).T.ravel()
    return Pairs(
        keys=pair_keys,
        prompt_ids=prompt_ids.take(both),
        response_ids=Packed.concatenate([chosen_ids, rejected_ids]).take(alternating),
    )
