"""A tokenizer to which special tokens in the texts of users and tools are plain text.

A tool may repeat what the model told it to, and nobody but the template ends a message.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from secrets import token_hex
from typing import Any

from rlflow.errors import EngineError, first_line

# A text that stands for a special token. Nobody can guess it.
_MARKER = token_hex(12)


class PlainTokenizer:
    """Encodes texts in which markers stand for special tokens that were plain text; else as the tokenizer does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._markers: dict[str, str] = {}
        self._ids: dict[str, list[int]] = {}
        specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        for number, text in enumerate(sorted(specials, key=len, reverse=True)):
            with suppress(Exception):  # a tokenizer of a few characters cannot encode it as text
                marker = f"{_MARKER}x{number}x"
                self._ids[marker] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
                self._markers[text] = marker
        self._texts = re.compile("|".join(map(re.escape, self._markers)) or r"(?!)")
        self._pattern = re.compile("(" + "|".join(self._ids) + ")")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # renderers would call this object if it seemed to be callable
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def protect(self, value: Any) -> Any:
        """Return messages or tools with markers. Messages of the model stay as they are."""
        if isinstance(value, str):
            return self._texts.sub(lambda match: self._markers[match[0]], value)
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        if isinstance(value, Mapping) and value.get("role") != "assistant":
            return {name: self.protect(item) for name, item in value.items()}
        return value

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Return the tokens of a part of a chat."""
        ids: list[int] = []
        for part in self._pattern.split(text) if _MARKER in text else [text]:
            ids += self._ids.get(part) or self._tokenizer.encode(part, add_special_tokens=False)
        return ids


def load_tokenizer(folder: str) -> Any:
    """Return the tokenizer of a folder. Raises EngineError."""
    try:
        if os.path.isfile(os.path.join(folder, "tokenizer.json")):
            from transformers import PreTrainedTokenizerFast  # needs no torch

            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise EngineError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}") from None
