"""Loading a model that DeepSpeed shards, layer by layer, so that no rank ever holds all of its weights.

By itself transformers reads the whole checkpoint on every rank and assembles the experts of all layers there: as many
copies of the model in a host's memory as the host has GPUs. Here rank 0 reads one layer at a time and broadcasts it.
Random weights are created in host memory instead, whole, so that they are the same however they are sharded.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.system.compat.transformers import zero3_loaded_by, zero3_loaders

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

# A weight's name up to the number of its layer. No assembled weight, such as experts, comes from several layers.
_LAYER = re.compile(r".*?\.\d+\.")

# A tensor, or a slice of a safetensors file that ``[...]`` reads.
Unread = Any
# Error messages, and the names of weights that the checkpoint lacks.
LoadResult = tuple[list[str], set[str]]


def load_sharded(spec: EngineSpec, config: dict[str, Any]) -> "PreTrainedModel":
    """Load the model of a role; a model from a path is sharded while it loads if ``config`` asks for ZeRO 3."""
    import torch

    dtype = getattr(torch, spec.model.dtype)
    if config["zero_optimization"]["stage"] < 3:
        return load_model(spec, dtype=dtype)
    with _zero3_loading(config) if spec.model.path is not None else nullcontext():
        return load_model(spec, dtype=dtype, device="cpu")


class _Zero3Config:
    """The part of DeepSpeed's configuration that transformers reads. Its own class for it needs another library."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def _zero3_loading(config: dict[str, Any]) -> Iterator[None]:
    """Make ``from_pretrained`` build a ZeRO-3 model, and load it layer by layer."""
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    # transformers keeps only a weak reference to it.
    zero3 = _Zero3Config(config)
    set_hf_deepspeed_config(zero3)
    try:
        with _layer_by_layer():
            yield
    finally:
        unset_hf_deepspeed_config()


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Make ``from_pretrained`` load a ZeRO-3 model layer by layer; every rank calls it at the same time."""
    import torch

    read_file, load_all = zero3_loaders()

    def list_entries(path: Any, **options: Any) -> Mapping[str, Unread]:
        """Return the entries of a file without reading them; files of other formats are mapped, and read on use."""
        tensors: Mapping[str, Unread] = (
            _safetensors_slices(str(path)) if str(path).endswith(".safetensors") else read_file(path, **options)
        )
        return tensors

    def load(model: "PreTrainedModel", state_dict: Mapping[str, Unread], config: Any = None) -> LoadResult:
        buffers = {name for name, _ in model.named_buffers()}
        errors: list[str] = []
        missing = set(model.state_dict())
        for layer in _layers(state_dict):
            # Rank 0 broadcasts each weight, but every rank needs its own buffers.
            values = {
                name: unread[...] if torch.distributed.get_rank() == 0 or name in buffers else _on_meta(unread)
                for name, unread in layer.items()
            }
            new_errors, still_missing = load_all(model, values, config)
            errors += new_errors
            missing &= still_missing
        return errors, missing

    with zero3_loaded_by(list_entries, load):
        yield


def _layers(state_dict: Mapping[str, Unread]) -> Iterator[dict[str, Unread]]:
    """Yield the entries of each layer, and entries outside of layers one by one."""
    layers: dict[str, dict[str, Unread]] = {}
    for name, unread in state_dict.items():
        layer = _LAYER.match(name)
        layers.setdefault(layer[0] if layer else name, {})[name] = unread
    yield from layers.values()


def _safetensors_slices(path: str) -> dict[str, Unread]:
    """Return an unread slice for each tensor of a safetensors file."""
    from safetensors import safe_open

    file: Any = safe_open(path, framework="pt")
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118


def _on_meta(unread: Unread) -> "Tensor":
    """Return a tensor of the same shape without data."""
    import torch

    shape = unread.shape if isinstance(unread, torch.Tensor) else unread.get_shape()
    return torch.empty(shape, device="meta")
