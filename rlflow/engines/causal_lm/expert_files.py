"""Experts under their names in a model's files, which have a weight of each expert and not one of all in a layer.

A sync sends the experts of a large layer like that, so that no process has to hold all of them at a time.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# The number of the first expert in a name.
_FIRST = ".0."


def names_in_files(model: Any, name: str, weight: "Tensor") -> list[str]:
    """Return the names of the first expert's weights in the files, which a weight has for all experts of a layer.

    Returns none for other weights.
    """
    if weight.dim() != 3:
        return []
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    # One expert with two outputs and two inputs shows how files name and cut all of them.
    probe = torch.arange(4.0).view(1, 2, 2)
    converted = revert_weight_conversion(model, {name: probe})
    pieces = probe[0].chunk(len(converted))
    are_rows = all(torch.equal(*pair) for pair in zip(converted.values(), (p.squeeze() for p in pieces), strict=True))
    return list(converted) if are_rows and all(_FIRST in file_name for file_name in converted) else []


def split_experts(names: Sequence[str], first: int, experts: "Tensor") -> "Iterator[tuple[str, Tensor]]":
    """Yield the names and values in files of ``experts``, of which the first has the number ``first`` in its layer."""
    for number, values in enumerate(experts, first):
        for name, piece in zip(names, values.chunk(len(names)), strict=True):
            before, _, after = name.rpartition(_FIRST)
            yield f"{before}.{number}.{after}", piece
