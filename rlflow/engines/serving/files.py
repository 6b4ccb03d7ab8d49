"""New weights on their way to ranks in other processes.

Adapters on their way to vLLM's ranks, which read them from files of peft's form.

The files of the model that vLLM serves, and the weights that it must be given.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.engines.base import EngineSpec
from rlflow.engines.buckets import Bucket, TensorEntry, build_buckets
from rlflow.engines.causal_lm.adapters import add_adapters, copied_name, is_adapter, trained, write_adapters
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer, loading_error, save_model
from rlflow.errors import EngineError, RecipeError
from rlflow.resources.memory.phases import LORA_RANKS
from rlflow.resources.models.lora import Lora

if TYPE_CHECKING:
    from torch import Tensor


_FILE_BYTES = 64 * 2**20
_SHARED_MEMORY = Path("/dev/shm")


def memory_folder() -> Path | None:
    """For files that never reach a disk; None where there is none."""
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None


@dataclass(frozen=True)
class SharedFile:
    """A bucket that all ranks read at the same place."""

    path: str
    entries: tuple[TensorEntry, ...]

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """Views of the file. Its memory is free when they and the file are gone."""
        return Bucket(self.entries, np.memmap(self.path, np.uint8, "r")).tensors()


def shared_files(weights: "Iterable[tuple[str, Tensor]]") -> Iterator[SharedFile]:
    """All ``weights`` in their order. A file is deleted when the next is asked for."""
    for bucket in build_buckets(weights, _FILE_BYTES):
        with tempfile.NamedTemporaryFile(prefix="rlflow-weights-", dir=memory_folder()) as file:
            bucket.data.tofile(file.name)
            yield SharedFile(file.name, bucket.entries)


def max_lora_rank(spec: EngineSpec, lora: Lora) -> int:
    """As vLLM is told it. Raises RecipeError for one that is too large."""
    if lora.rank > LORA_RANKS[-1]:
        raise RecipeError(
            f"roles.{spec.role}",
            f"vLLM takes no adapters of rank {lora.rank} over: {LORA_RANKS[-1]} is the most",
            fix=f"a lora.rank of {LORA_RANKS[-1]} of the role that it follows, or engine: transformers",
        )
    return next(rank for rank in LORA_RANKS if rank >= lora.rank)


@contextmanager
def adapter_files(lora: Lora, weights: "Iterable[tuple[str, Tensor]]") -> Iterator[str]:
    """A folder in shared memory, there only inside."""
    with tempfile.TemporaryDirectory(prefix="rlflow-adapters-", dir=memory_folder()) as folder:
        write_adapters(Path(folder), lora, dict(weights), None)
        yield folder


@contextmanager
def model_files(spec: EngineSpec) -> Iterator[str]:
    """A folder, or a name on the hub. That of a new model is there only inside."""
    import torch

    if spec.model.path is not None:
        yield spec.model.path
        return
    with TemporaryDirectory(prefix="rlflow-model-") as folder:
        dtype = getattr(torch, spec.model.dtype)
        model = load_model(spec.model_name, spec.model, device="cpu", dtype=dtype, seed=spec.seed)
        save_model(model, load_tokenizer(spec.model_name, spec.model), Path(folder))
        yield folder


@dataclass(frozen=True)
class Expected:
    """The weights of a model that it follows, by the names of its files; or the adapters, by those of peft's."""

    shapes: dict[str, tuple[int, ...]]
    required: frozenset[str]
    """Without those that are tied to others."""

    @classmethod
    def of(cls, config: Any, spec: EngineSpec) -> "Expected":
        """``config`` is the model's, of transformers. Raises RecipeError for adapters of layers that it has not."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.model.trust_remote_code)
            add_adapters(model, spec)
        copied = {name: tuple(tensor.shape) for name, tensor in trained(model.state_dict(), spec.lora).items()}
        required = trained(dict(model.named_parameters()), spec.lora)
        shapes = {copied_name(name): shape for name, shape in copied.items()}
        return cls(shapes, frozenset(map(copied_name, required)))

    @property
    def adapted(self) -> list[str]:
        """The names of layers that have adapters: ``q_proj``."""
        return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in self.shapes if is_adapter(name)})

    def checked(self, role: str, weights: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        """The same weights. Raises EngineError at one that does not fit, and at the end if some are missing."""
        missing = set(self.required)
        for name, tensor in weights:
            if self.shapes.get(name) != tuple(tensor.shape):
                raise EngineError(f"role {role}: the weight '{name}' does not fit the model.")
            missing.discard(name)
            yield name, tensor
        if missing:
            raise EngineError(f"role {role}: the weights lack '{min(missing)}'.")


def load_config(name: str, folder: str, *, trust_remote_code: bool = False) -> Any:
    """The model's ``config.json``, of transformers. Raises RecipeError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the libraries below raise errors of many kinds for a damaged file
        raise loading_error(name, folder, error) from None


def load_end_ids(folder: str, config: Any) -> list[int | list[int] | None]:
    """As the model's authors give them."""
    from transformers import GenerationConfig

    try:
        return [GenerationConfig.from_pretrained(folder).eos_token_id]
    except OSError:
        return [GenerationConfig.from_model_config(config).eos_token_id]
