"""A checkpoint that goes into a ZeRO-3 model layer by layer, read by one rank.

By itself transformers reads the whole checkpoint on every rank, and puts the experts of all layers together there: as
many copies of the model in a host's memory as the host has GPUs.
Importing this file imports torch and transformers.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, modeling_utils

# Up to the number of a layer. Nothing that is put together, such as experts, comes from several layers.
_LAYER = re.compile(r".*?\.\d+\.")

# A tensor, or a place in a safetensors file that is read by ``[...]``.
Unread = Any
# Error messages, and the names of weights that the checkpoint lacks.
Loaded = tuple[list[str], set[str]]


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Make ``from_pretrained`` load a ZeRO-3 model layer by layer. Every rank calls it together with the others."""
    read_file, load_all = modeling_utils.load_state_dict, modeling_utils._load_state_dict_into_zero3_model

    def entries(path: Any, **options: Any) -> Mapping[str, Unread]:
        """Return the entries of a file without reading them. Files of other kinds are mapped, and read on use."""
        tensors: Mapping[str, Unread] = (
            _places(str(path)) if str(path).endswith(".safetensors") else read_file(path, **options)
        )
        return tensors

    def load(model: PreTrainedModel, state_dict: Mapping[str, Unread], config: Any = None) -> Loaded:
        buffers = {name for name, _ in model.named_buffers()}
        errors: list[str] = []
        missing = set(model.state_dict())
        for layer in _layers(state_dict):
            # Rank 0 hands each weight to all; of buffers each rank has its own.
            values = {
                name: unread[...] if torch.distributed.get_rank() == 0 or name in buffers else _without_data(unread)
                for name, unread in layer.items()
            }
            more, lacking = load_all(model, values, config)
            errors += more
            missing &= lacking
        return errors, missing

    modeling_utils.load_state_dict = entries
    modeling_utils._load_state_dict_into_zero3_model = load
    try:
        yield
    finally:
        modeling_utils.load_state_dict = read_file
        modeling_utils._load_state_dict_into_zero3_model = load_all


def _layers(state_dict: Mapping[str, Unread]) -> Iterator[dict[str, Unread]]:
    """Yield the entries of each layer, and entries outside of layers one by one."""
    layers: dict[str, dict[str, Unread]] = {}
    for name, unread in state_dict.items():
        found = _LAYER.match(name)
        layers.setdefault(found[0] if found else name, {})[name] = unread
    yield from layers.values()


def _places(path: str) -> dict[str, Unread]:
    """Return the places of all tensors of a safetensors file."""
    file: Any = safe_open(path, framework="pt")
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118


def _without_data(unread: Unread) -> torch.Tensor:
    """Return a tensor of the same shape that has no data."""
    shape = unread.shape if isinstance(unread, torch.Tensor) else unread.get_shape()
    return torch.empty(shape, device="meta")
