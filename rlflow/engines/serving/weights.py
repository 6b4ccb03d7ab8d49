"""New weights for vLLM: checked against the model, and written where ranks in other processes can read them.

Full weights reach several ranks in files of one bucket each, those on several hosts as the buckets themselves. Adapters
reach them as a folder in peft's format, which is what vLLM loads adapters from. Nothing touches a disk: files are in
``/dev/shm``, if the host has it.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.engines.base import EngineSpec
from rlflow.engines.buckets import LARGEST_BYTES, Bucket, TensorEntry, build_buckets, join_parts
from rlflow.engines.causal_lm.adapters import (
    add_adapters,
    is_adapter,
    save_adapters,
    sent_weights,
    synced_weights,
    transfer_name,
)
from rlflow.engines.causal_lm.expert_files import names_in_files, split_experts
from rlflow.engines.vision.base import find_family
from rlflow.errors import EngineError
from rlflow.resources.layout import Layout
from rlflow.resources.models.lora import Lora

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_FILE_BYTES = 64 * 2**20
# A folder whose files are held in memory, if the host has one.
_MEMORY_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True)
class ExpectedWeights:
    """The weights that a weight sync may bring: those of the model, or of its adapters, by their transfer names."""

    shapes: dict[str, tuple[int, ...]]
    required: frozenset[str]
    """The names that it must bring: not those of tied weights, and not those of parts that stay as they are."""
    experts: "Mapping[str, Mapping[str, Tensor]]"
    """The experts that may come in place of a weight, by its name: views of it by their names in files."""

    @classmethod
    def of(cls, config: Any, spec: EngineSpec) -> "ExpectedWeights":
        """Build the model from transformers' ``config``, without data, to see what its weights are.

        Raises RecipeError for adapters of layers that the model does not have.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        auto = AutoModelForCausalLM if find_family(config.model_type) is None else AutoModelForImageTextToText
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=spec.model.trust_remote_code)
            add_adapters(model, spec)
        return cls.of_model(model, spec)

    @classmethod
    def of_model(cls, model: "PreTrainedModel", spec: EngineSpec) -> "ExpectedWeights":
        """Return the weights of a model, which needs no data."""
        import torch

        state = sent_weights(model.state_dict(), spec.lora)
        required = synced_weights(model, dict(model.named_parameters()), spec)
        shapes = {transfer_name(name): tuple(tensor.shape) for name, tensor in state.items()}
        itemsize, experts = getattr(torch, spec.model.dtype).itemsize, {}
        for name, tensor in state.items():
            is_large = tensor.numel() * itemsize > LARGEST_BYTES
            if is_large and (names := names_in_files(model, name, tensor)):
                experts[transfer_name(name)] = dict(split_experts(names, 0, tensor))
        return cls(shapes, frozenset(map(transfer_name, required)), experts)

    @property
    def adapted_layers(self) -> list[str]:
        """Return the names of the layers that have adapters, such as ``q_proj``."""
        return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in self.shapes if is_adapter(name)})

    def check(self, role: str, weights: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        """Yield the weights, joined; raise EngineError at one that does not fit, or at the end if some are missing."""
        missing, shapes = set(self.required), self.shapes.copy()
        layers = {expert: layer for layer, experts in self.experts.items() for expert in experts}
        for name, tensor in join_parts(weights):
            if (layer := layers.get(name)) in missing:
                # The first of its experts has come, and all must.
                missing.remove(layer)
                missing |= self.experts[layer].keys()
                shapes |= {expert: tuple(view.shape) for expert, view in self.experts[layer].items()}
            if shapes.get(name) != tuple(tensor.shape):
                raise EngineError(f"role {role}: the weight '{name}' does not fit the model.")
            missing.discard(name)
            yield name, tensor
        if missing:
            raise EngineError(f"role {role}: the weights lack '{min(missing)}'.")


@dataclass(frozen=True)
class SharedFile:
    """A bucket in a file that all ranks map into their memory."""

    path: str
    entries: tuple[TensorEntry, ...]

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield views of the file. Its memory is freed once they and the file are deleted."""
        return Bucket(self.entries, np.memmap(self.path, np.uint8, "r")).tensors()


def parts_for_ranks(weights: "Iterable[tuple[str, Tensor]]", layout: Layout) -> "Iterable[Any]":
    """Return the weights in parts that the ranks of an engine can read, each until the next one is requested."""
    if layout.model_parallel_size == 1:
        return [weights]
    # Ranks on other hosts see none of this host's files.
    return write_shared_files(weights) if layout.hosts_per_engine == 1 else build_buckets(weights, _FILE_BYTES)


def write_shared_files(weights: "Iterable[tuple[str, Tensor]]") -> Iterator[SharedFile]:
    """Yield all ``weights`` in order, bucket by bucket; a file is deleted when the next one is requested."""
    for bucket in build_buckets(weights, _FILE_BYTES):
        with tempfile.NamedTemporaryFile(prefix="rlflow-weights-", dir=_MEMORY_FOLDER) as file:
            bucket.data.tofile(file.name)
            yield SharedFile(file.name, bucket.entries)


@contextmanager
def adapter_folder(lora: Lora, weights: "Iterable[tuple[str, Tensor]]") -> Iterator[str]:
    """Write adapters to a folder in shared memory, which is deleted on exit."""
    with tempfile.TemporaryDirectory(prefix="rlflow-adapters-", dir=_MEMORY_FOLDER) as folder:
        save_adapters(Path(folder), lora, dict(weights))
        yield folder
