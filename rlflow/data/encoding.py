"""Encodes rows of a data set: conversations become prompts and responses, and both become tokens.

Shapes: P prompts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed
from rlflow.data.chat_template import TemplateError, format_chat, render_all
from rlflow.data.image_prompts import ImagePrompts, Images, check_truncation
from rlflow.data.images import IMAGES, without_images
from rlflow.data.messages import describe_content, is_conversation
from rlflow.data.mistakes import Rows, column_of, converted_errors, fix_for_texts, row_error
from rlflow.data.responses import encode_responses, encode_turns
from rlflow.errors import RecipeError
from rlflow.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlflow.engines.vision.base import VisionFamily


_MAX_CHARACTERS = 2**23
"""Characters of a prompt that is encoded. A longer one is too long for every model, and would take minutes."""

_MESSAGES_AS_TEXT = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")

Split = Literal["split", "eval_split"]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Encoded:
    """The rows of a split without those that are dropped, and their tokens."""

    rows: Rows
    prompt_ids: Packed
    responses: tuple[Packed, ...]
    """One for each requested column."""
    trained: Packed | None = None
    """The tokens of responses that are trained on, P rows of bool; None for all."""
    images: tuple[Images, ...] | None = None
    """[P]: the images of each prompt; None if no row has any."""
    warnings: tuple[str, ...] = ()
    vision: "VisionFamily | None" = None
    """How the model sees images; None if no row has any."""


@dataclass(frozen=True)
class Reader:
    """A description of the model that reads the prompts, besides its tokenizer."""

    num_embeddings: int | None = None
    """The number of tokens that it has embeddings for."""
    load_vision: "Callable[[], VisionFamily] | None" = None
    """Loads the way in which it sees images, and raises RecipeError for other models; None if it reads text alone."""


UNKNOWN_READER = Reader()


def encode(
    data: Data,
    tokenizer: "PreTrainedTokenizerBase",
    rows: Rows,
    split: Split,
    responses: Sequence[str],
    reader: Reader = UNKNOWN_READER,
) -> Encoded:
    """Encode the prompts of all rows, and the columns named in ``responses``. Raises RecipeError."""
    if not rows:
        empty = Packed.from_rows([], np.int32)
        return Encoded(rows, empty, (empty,) * len(responses))
    warnings: tuple[str, ...] = ()
    if reader.load_vision is None:
        rows, warnings = without_images(data, rows)
    _check_responses(data, rows, responses)
    is_huge = np.array([_num_characters(row.get("prompt")) > _MAX_CHARACTERS for row in rows])
    if is_huge.any() and data.overlong != "drop":
        fact = f"has a prompt of more than {_MAX_CHARACTERS} characters"
        raise row_error(data, int(is_huge.argmax()), fact, fix="data.overlong=drop, or shorten the prompt")
    # Their first characters stand for these prompts, whose rows are dropped.
    short_rows = [
        {**row, "prompt": _shorten(row["prompt"])} if huge else row for row, huge in zip(rows, is_huge, strict=True)
    ]
    images = tuple(row.get(IMAGES) or () for row in rows) if reader.load_vision else ()
    image_prompts = None
    if any(images) and reader.load_vision is not None:
        check_truncation(data)
        seen = [() if huge else shown for shown, huge in zip(images, is_huge, strict=True)]
        vision = reader.load_vision()
        image_prompts = ImagePrompts(data, vision, seen)
    prompt_ids = _encode_prompts(data, tokenizer, short_rows, image_prompts)
    trained = None
    if responses and data.train_on == "all":
        ids, trained = encode_turns(data, tokenizer, rows)
        columns: tuple[Packed, ...] = (ids,)
    else:
        columns = tuple(encode_responses(data, tokenizer, rows, name) for name in responses)
    if reader.num_embeddings is not None:
        for ids in (prompt_ids, *columns):
            _check_embeddings(data, tokenizer, ids, reader.num_embeddings)
    if image_prompts is None:
        return _apply_prompt_limit(data, split, Encoded(rows, prompt_ids, columns, trained, warnings=warnings), is_huge)
    for name, ids in zip(responses, columns, strict=True):
        image_prompts.check_responses(name, ids)
    rows = [{name: value for name, value in row.items() if name != IMAGES} for row in rows]
    return _apply_prompt_limit(data, split, Encoded(rows, prompt_ids, columns, trained, images, vision=vision), is_huge)


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
        raise row_error(data, row, fact, fix)


def _check_responses(data: Data, rows: Rows, responses: Sequence[str]) -> None:
    """Raise RecipeError for responses that repeat their prompts. One conversation may hold both."""
    prompts = data.columns.get("prompt", "prompt")
    for name in responses:
        if data.columns.get(name, name) == prompts and not is_conversation(rows[0].get(name)):
            fact = f"prompt and {name} are both '{prompts}', so that each response repeats its prompt"
            raise RecipeError(f"data.columns.{name}", fact, fix=f"name the column of the responses: {name}: COLUMN")


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
            fix=f"data.max_prompt_tokens={ids.lengths[row]}, data.overlong=drop"
            + (" or data.overlong=truncate_left" if encoded.images is None else ""),
        )
    fact = f"{too_long} of {total} prompts of '{getattr(data, split)}' are longer than {limit} tokens"
    if data.overlong == "truncate_left":
        cut = Packed.from_rows([ids[row][-limit:] for row in range(total)], np.int32)
        warning = f"data.overlong: {fact}; only their last {limit} tokens are used"
        return replace(encoded, prompt_ids=cut, warnings=(*encoded.warnings, warning))
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
        None if encoded.trained is None else encoded.trained.take(short),
        None if encoded.images is None else tuple(encoded.images[row] for row in short),
        (*encoded.warnings, f"data.overlong: {fact} and are dropped"),
        encoded.vision,
    )


def _encode_prompts(
    data: Data, tokenizer: "PreTrainedTokenizerBase", rows: Rows, image_prompts: ImagePrompts | None
) -> Packed:
    column = column_of(data, rows, "prompt")
    if [] in column:
        raise row_error(data, column.index([]), "has no message before the assistant's")
    if data.system_prompt is not None and not tokenizer.chat_template:
        fact = "needs a chat template, and the tokenizer has none"
        fix = "write models.NAME.chat_template, or data.system_prompt=null and instructions in the prompts"
        raise RecipeError("data.system_prompt", fact, fix=fix)
    for row, prompt in enumerate(column):
        if isinstance(prompt, str) and _MESSAGES_AS_TEXT.match(prompt):
            fact = f"has a prompt that is the text of a list of messages ({prompt[:80]})"
            raise row_error(data, row, fact, fix="save the messages as a list, in a JSON or Parquet file")
    for option in data.template_options:
        # A template ignores arguments that it does not know, so that a wrong name would change nothing.
        if not re.search(rf"\b{re.escape(option)}\b", str(tokenizer.chat_template or "")):
            fact = "the tokenizer's chat template does not read it"
            raise RecipeError(f"data.template_options.{option}", fact, fix="remove it, or correct its name")
    if tokenizer.chat_template:
        for row, prompt in enumerate(column):
            if not isinstance(prompt, str | int | float) and not is_conversation(prompt):
                fact = "has a prompt that is neither a text nor a list of messages with a 'role' each"
                raise row_error(data, row, f"{fact} ({str(prompt)[:80]})")
            contents = [message.get("content") for message in prompt] if is_conversation(prompt) else ()
            if other := next((content for content in contents if not isinstance(content, str | NoneType)), None):
                fact, fix = describe_content(other)
                raise row_error(data, row, fact, fix)
        render = partial(format_chat, data, tokenizer)
        if image_prompts is not None:
            column = image_prompts.tagged(column)
            render = partial(format_chat, data, tokenizer, adapt=image_prompts.for_template(render))
        try:
            texts = render_all(render, column)
        except TemplateError as error:
            fact = f"the tokenizer's chat template {error} of '{data.source}'"
            raise RecipeError("data.source", fact, fix=fix_for_texts(data)) from None
        encoded = converted_errors(data, lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
    elif any(not isinstance(prompt, str) for prompt in column):
        raise RecipeError(
            "data.columns.prompt",
            "prompts are not texts, and the tokenizer has no chat template",
            fix="a column of texts, or write models.NAME.chat_template",
        )
    else:
        if image_prompts is not None:
            column = [image_prompts.as_text(prompt) for prompt in image_prompts.tagged(column)]
        encoded = converted_errors(data, lambda: tokenizer(column)["input_ids"])
    packed = Packed.from_rows(encoded, np.int32)
    if image_prompts is not None:
        packed = image_prompts.expand(packed)
    if (empty := np.flatnonzero(packed.lengths == 0)).size:
        raise row_error(data, int(empty[0]), "has an empty prompt")
    return packed
