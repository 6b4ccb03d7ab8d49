"""Private names of transformers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def zero3_loaders() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions by which ``from_pretrained`` reads a file, and loads its entries into a ZeRO-3 model."""
    from transformers import modeling_utils

    return modeling_utils.load_state_dict, modeling_utils._load_state_dict_into_zero3_model


@contextmanager
def zero3_loaded_by(read: Callable[..., Any], load: Callable[..., Any]) -> Iterator[None]:
    """Make ``from_pretrained`` read files and load ZeRO-3 models by other functions.

    transformers itself reads all files on every rank, before it loads any weight.
    """
    from transformers import modeling_utils

    before = zero3_loaders()
    modeling_utils.load_state_dict, modeling_utils._load_state_dict_into_zero3_model = read, load
    try:
        yield
    finally:
        modeling_utils.load_state_dict, modeling_utils._load_state_dict_into_zero3_model = before
